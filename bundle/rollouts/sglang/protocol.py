"""What SGLang is asked, as typed requests with its own field names, and what it answers.

The names are those of 0.5.16 to 0.5.23. Fields whose default would do harm are always written: an update with
requests present ends the server where it also flushes, and a null load_format is that of the start, dummy.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from bundle.errors import JobFailed, format_value
from bundle.rollouts import Answer, FinishReason, Request, Sampling

_FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class InvalidAnswer(JobFailed):
    """An answer of a server that cannot be learned from."""


@dataclass(frozen=True)
class ServerRequest:
    """A request; its fields are those of the JSON body. `key` opens the route, health needs none."""

    method: ClassVar[Literal["GET", "POST"]] = "POST"
    path: ClassVar[str]
    key: ClassVar[Literal["api", "admin"] | None] = "admin"

    def to_body(self) -> dict[str, Any]:
        """Return the JSON body; fields that are None are left out."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Generate(ServerRequest):
    """One answer from ids. `rid` names it in the server."""

    path = "/generate"
    key = "api"
    rid: str
    input_ids: list[int]
    sampling_params: dict[str, Any]
    return_logprob: bool = True


@dataclass(frozen=True)
class PauseGeneration(ServerRequest):
    """End all requests with what they have; later ones wait."""

    path = "/pause_generation"
    mode: Literal["abort"] = "abort"


@dataclass(frozen=True)
class ContinueGeneration(ServerRequest):
    path = "/continue_generation"


@dataclass(frozen=True)
class FlushCache(ServerRequest):
    """Forget keys and values of the old weights; 400 while requests are there."""

    path = "/flush_cache"


@dataclass(frozen=True)
class ReleaseMemory(ServerRequest):
    """Free the memory of these tags; null would be all of them."""

    path = "/release_memory_occupation"
    tags: list[str]


@dataclass(frozen=True)
class ResumeMemory(ServerRequest):
    path = "/resume_memory_occupation"
    tags: list[str]


@dataclass(frozen=True)
class UpdateFromDisk(ServerRequest):
    """Load a directory into target and draft. After a 400 the weights are partly new."""

    path = "/update_weights_from_disk"
    model_path: str
    load_format: str = "safetensors"
    flush_cache: bool = False
    abort_all_requests: bool = False


@dataclass(frozen=True)
class UpdateFromTensor(ServerRequest):
    """Load a bucket into target and draft; each rank of the server opens a payload of its own."""

    path = "/update_weights_from_tensor"
    serialized_named_tensors: list[str]
    load_format: str = "flattened_bucket"
    flush_cache: bool = False
    abort_all_requests: bool = False


@dataclass(frozen=True)
class UpdateVersion(ServerRequest):
    """Name the weights; the server itself counts nothing."""

    path = "/update_weight_version"
    new_version: str
    abort_all_requests: bool = False


@dataclass(frozen=True)
class CheckWeights(ServerRequest):
    """Checksums of all tensors, or noise into all of them. `selector` is known to servers with sessions."""

    path = "/weights_checker"
    action: Literal["checksum", "reset_tensors"]
    selector: Literal["all"] | None = None


@dataclass(frozen=True)
class HealthGenerate(ServerRequest):
    """Whether the server can generate a token."""

    method = "GET"
    path = "/health_generate"
    key = None


@dataclass(frozen=True)
class ModelInfo(ServerRequest):
    method = "GET"
    path = "/model_info"
    key = "api"


@dataclass(frozen=True)
class ServerInfo(ServerRequest):
    method = "GET"
    path = "/server_info"
    key = "api"


@dataclass(frozen=True)
class ProbeUpdateSessions(ServerRequest):
    """405 where updates run in sessions (0.5.21 and later), 404 where they do not; nothing happens."""

    method = "GET"
    path = "/begin_weight_update"
    key = "api"


def build_generate(request: Request, sampling: Sampling, partial: Answer | None) -> Generate:
    """Return what is asked for an answer, or for the rest of one that was interrupted."""
    done = partial.ids if partial else ()
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "max_new_tokens": sampling.max_completion_length - len(done),
        "top_p": 1.0,
        # SGLang reads its own end tokens and stop_token_ids only where it does not ignore ends.
        "ignore_eos": not sampling.stop,
        "stop_token_ids": list(sampling.stop),
        "skip_special_tokens": False,
    }
    if sampling.greedy:
        params["top_k"] = 1
    rid = f"{sampling.seed}/{sampling.step}/{request.question}/{request.answer}/{len(done)}"
    return Generate(rid, [*request.ids, *done], params)


def read_answer(
    document: Any,
    request: Request,
    sampling: Sampling,
    partial: Answer | None,
    *,
    version: int,
    vocab_size: int,
) -> Answer:
    """Return the answer of a reply to `build_generate`, behind the tokens that it had before.

    Raise InvalidAnswer for one that cannot be learned from.
    """
    try:
        meta = document["meta_info"]
        ids = [int(token) for token in document["output_ids"]]
        pairs = [(float(entry[0]), int(entry[1])) for entry in meta.get("output_token_logprobs") or ()]
        kind = str(meta["finish_reason"]["type"])
        spans = meta.get("weight_versions") or [{"version": meta["weight_version"]}]
        versions = sorted({str(span["version"]) for span in spans})
    except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        raise InvalidAnswer(f"its reply is not an answer: {format_value(document)}.") from error
    limit = sampling.max_completion_length - (len(partial.ids) if partial else 0)
    if len(pairs) != len(ids) or [token for _, token in pairs] != ids:
        raise InvalidAnswer(f"it returned {len(ids)} tokens but log-probabilities of {len(pairs)}.")
    if foreign := [token for token in ids if not 0 <= token < vocab_size]:
        raise InvalidAnswer(f"it returned token {foreign[0]}, but the vocabulary has {vocab_size} tokens.")
    if not all(math.isfinite(value) and value <= 1e-3 for value, _ in pairs):
        raise InvalidAnswer("it returned invalid log-probabilities.")
    if versions != [str(version)]:
        raise InvalidAnswer(f"it answered with version {', '.join(versions)}, not {version}.")
    reason = _FINISH_REASONS.get(kind)
    is_stopped = bool(ids) and ids[-1] in sampling.stop
    if (
        reason is None
        or len(ids) > limit
        or (reason == "stop" and not is_stopped)
        or (reason == "length" and len(ids) < limit)
    ):
        raise InvalidAnswer(f"it ended an answer of {len(ids)} tokens with {format_value(kind)}.")
    log_probs = np.array([value for value, _ in pairs], dtype=np.float32)
    tokens = np.full(len(ids), version, dtype=np.int32)
    if partial is not None:
        ids = [*partial.ids, *ids]
        log_probs = np.concatenate((partial.log_probs, log_probs))
        tokens = np.concatenate((partial.versions, tokens))
    return Answer(request.question, request.answer, tuple(ids), log_probs, tokens, reason)


def read_checksums(document: Any) -> Mapping[str, str]:
    """Return the checksums of a reply to CheckWeights by name; of several ranks by `rank:name`."""
    try:
        ranks = [dict(rank["checksums"]) for rank in document["ranks"]]
    except (TypeError, ValueError, KeyError) as error:
        raise JobFailed(f"it returned no checksums: {format_value(document)}.") from error
    if len(ranks) == 1:
        return ranks[0]
    return {f"{number}:{name}": value for number, rank in enumerate(ranks) for name, value in rank.items()}
