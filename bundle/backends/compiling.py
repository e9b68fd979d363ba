"""A torch.compile that leaves megatron-core's functions as they are; megatron is not imported for it."""

import functools
from collections.abc import Callable
from typing import Any


def exempt_megatron_from_compile(
    original: Callable[..., Any], is_eager: Callable[[], bool]
) -> Callable[..., Any]:
    """Return a `torch.compile` that runs megatron's functions as they are while `is_eager()`.

    It compiles all others. Megatron binds `jit_fuser = torch.compile` when it is imported and decorates its
    small fused functions with it. Compiling them takes minutes on a cpu and saves no time, and is broken
    under torch-npu's names. The choice is made for each function and call: a megatron that was imported under
    the cpu's facade compiles again when the facade is gone.
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
            return (model if is_eager() else compiled())(*args, **kwargs)

        return call

    return compile
