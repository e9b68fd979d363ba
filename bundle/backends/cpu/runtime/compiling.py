"""The replacement of torch.compile under which megatron's own functions run eagerly."""

import functools
from collections.abc import Callable
from typing import Any


def eager_for_megatron(original: Callable[..., Any], active: Callable[[], bool]) -> Callable[..., Any]:
    """A `torch.compile` that runs megatron's functions as they are while `active()`, and compiles all others.

    Megatron binds `jit_fuser = torch.compile` when it is imported and decorates its small fused functions
    with it. Compiling them takes minutes on a cpu and buys nothing. It is decided per function and per call:
    a megatron that was imported under the facade compiles as it always did when the facade is gone.
    """

    @functools.wraps(original)
    def compile(model: Callable[..., Any] | None = None, **options: Any) -> Any:
        if model is None:
            return functools.partial(compile, **options)
        if getattr(model, "__module__", "").partition(".")[0] != "megatron":
            return original(model, **options)
        compiled = functools.cache(lambda: original(model, **options))

        @functools.wraps(model)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (model if active() else compiled())(*args, **kwargs)

        return call

    return compile
