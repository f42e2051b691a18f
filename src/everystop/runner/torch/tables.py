"""What the device keeps of the requests on board, a row for each seat: tokens, blocks, and how they are sampled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from everystop.runner.torch.settings import FLOATS, INTEGERS
from everystop.runner.torch.steps import Room, Step

Array = npt.NDArray[Any]


class Tables:
    """Tensors of `max_num_seqs` seats and a spare one, which pads captured steps.

    Sampled tokens are written into `token_ids` by the step that samples them, so that the next one finds them there
    before the host has seen them.
    """

    def __init__(self, room: Room, device: torch.device) -> None:
        self.room = room
        seats, words = room.max_num_seqs + 1, -(-room.num_valid_tokens // 32)

        def table(columns: int, dtype: torch.dtype, value: int = 0) -> Tensor:
            return torch.full((seats, columns), value, dtype=dtype, device=device)

        self.token_ids = table(room.max_tokens, torch.int32)
        self.block_tables = table(room.max_blocks, torch.int32, room.spare_block)
        self.floats = table(len(FLOATS), torch.float64)
        self.integers = table(len(INTEGERS), torch.int64)
        self.output_counts = table(room.vocab_size, torch.int32)
        self.is_in_prompt = table(room.vocab_size, torch.bool)
        self.allowed = table(words, torch.int32, -1)

    @staticmethod
    def num_bytes(room: Room) -> int:
        """What they take on the device."""
        columns = 4 * (room.max_tokens + room.max_blocks + -(-room.num_valid_tokens // 32)) + 5 * room.vocab_size
        return (room.max_num_seqs + 1) * (columns + 8 * (len(FLOATS) + len(INTEGERS)))

    # Flat positions in the tables, as `index_copy_` takes them.

    def token_slots(self, seats: Array, positions: Array) -> Array:
        """Where in `token_ids` a seat's token at a position lies."""
        return seats.astype(np.int64) * self.room.max_tokens + positions

    def writes_of(self, step: Step) -> dict[str, Array]:
        """What a step changes before its tokens are computed, as numbers for the device."""
        room, boardings = self.room, step.boardings
        arrays: dict[str, Array] = {}
        if boardings:
            seats = np.array([b.rider.seat for b in boardings], dtype=np.int64)
            lengths = np.array([len(b.token_ids) for b in boardings])
            within = np.concatenate([np.arange(n) for n in lengths])
            arrays["boarding.seats"] = seats
            arrays["boarding.floats"] = np.array([b.rider.settings.floats() for b in boardings])
            numbers = [b.rider.settings.integers(b.rider.num_prompt_tokens) for b in boardings]
            arrays["boarding.integers"] = np.array(numbers, dtype=np.int64)
            arrays["tokens.slots"] = self.token_slots(np.repeat(seats, lengths), within)
            arrays["tokens.ids"] = np.concatenate([b.token_ids for b in boardings])
            masks = [b.rider.settings.allowed for b in boardings]
            if any(mask is not None for mask in masks):
                everything = np.full(self.allowed.shape[1], -1, dtype=np.int32)
                arrays["boarding.allowed"] = np.stack([everything if mask is None else mask for mask in masks])
        writes = [(seat * room.max_blocks + index, blocks) for seat, index, blocks in step.table_writes if blocks]
        if writes:
            slots = np.concatenate([np.arange(len(b), dtype=np.int64) + at for at, b in writes])
            ids = np.concatenate([np.array(b, dtype=np.int32) for _, b in writes])
            # Of two writes to one place the later counts; the device would do them in any order.
            arrays["blocks.slots"], last = np.unique(slots[::-1], return_index=True)
            arrays["blocks.ids"] = ids[::-1][last]
        return arrays

    def write(self, landed: Mapping[str, Tensor], step: Step) -> None:
        """Carry out what `writes_of` has prepared; part of submitted work."""
        if "boarding.seats" in landed:
            seats = landed["boarding.seats"]
            self.floats.index_copy_(0, seats, landed["boarding.floats"])
            self.integers.index_copy_(0, seats, landed["boarding.integers"])
            self.token_ids.view(-1).index_copy_(0, landed["tokens.slots"], landed["tokens.ids"])
            if "boarding.allowed" in landed:
                self.allowed.index_copy_(0, seats, landed["boarding.allowed"])
        if "blocks.slots" in landed:
            self.block_tables.view(-1).index_copy_(0, landed["blocks.slots"], landed["blocks.ids"])
        for boarding in step.boardings:
            if boarding.rider.settings.has_penalties:
                self._count(boarding.rider.seat, boarding.rider.num_prompt_tokens, len(boarding.token_ids))

    def _count(self, seat: int, num_prompt_tokens: int, num_tokens: int) -> None:
        """Note which tokens a seat's prompt and output hold."""
        ids = self.token_ids[seat, :num_tokens].long()
        self.is_in_prompt[seat].zero_().index_fill_(0, ids[:num_prompt_tokens], True)
        output = ids[num_prompt_tokens:]
        self.output_counts[seat].zero_().index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
