"""What a dialect calls a field: errors that come up when a body has been read speak of OpenAI's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

from everystop.core.errors import RequestError

E = TypeVar("E", bound=Exception)


def in_names(error: E, names: Mapping[str, str]) -> E:
    """The same error, which calls fields by these names now; one that is not about a request stays as it is.

    Example: with {"max_tokens": "max_new_tokens"}, "lower max_tokens to 5" becomes "lower max_new_tokens to 5".
    """
    if not names or not isinstance(error, RequestError):
        return error
    field = re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, names))})(?![\w-])")
    error.args = (field.sub(lambda found: names[found[0]], str(error)),)
    if error.param is not None:
        error.param = field.sub(lambda found: names[found[0]], error.param)
    return error
