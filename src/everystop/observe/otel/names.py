"""The names of OpenTelemetry's GenAI conventions, which still change, and those that tools for vLLM read.

Conventions of 2026 (https://opentelemetry.io/docs/specs/semconv/gen-ai/) where nothing else is said.
"""

from __future__ import annotations

SPAN_REQUEST = "llm_request"  # vLLM's

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
SYSTEM_OLD = "gen_ai.system"  # the provider, until 2025
REQUEST_MODEL = "gen_ai.request.model"
RESPONSE_MODEL = "gen_ai.response.model"
RESPONSE_ID = "gen_ai.response.id"
REQUEST_ID_VLLM = "gen_ai.request.id"
MAX_TOKENS = "gen_ai.request.max_tokens"
CHOICES = "gen_ai.request.choice.count"
CHOICES_VLLM = "gen_ai.request.n"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
INPUT_TOKENS_OLD = "gen_ai.usage.prompt_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
OUTPUT_TOKENS_OLD = "gen_ai.usage.completion_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
FINISH_REASONS = "gen_ai.response.finish_reasons"
ERROR = "error.type"

IN_QUEUE_VLLM = "gen_ai.latency.time_in_queue"
FIRST_TOKEN_VLLM = "gen_ai.latency.time_to_first_token"
E2E_VLLM = "gen_ai.latency.e2e"
IN_PREFILL_VLLM = "gen_ai.latency.time_in_model_prefill"
IN_DECODE_VLLM = "gen_ai.latency.time_in_model_decode"
IN_INFERENCE_VLLM = "gen_ai.latency.time_in_model_inference"

# This project's own.
GIVEN_ID = "everystop.request.given_id"
MAIN_CAUSE = "everystop.main_cause"
PREEMPTIONS = "everystop.preemptions"
RECOMPUTED_TOKENS = "everystop.recomputed_tokens"
STEPS = "everystop.steps"
COMPUTED_TOKENS = "everystop.computed_tokens"
SECONDS_OF = "everystop.seconds."  # and the name of a cause
