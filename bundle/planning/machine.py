"""Which machine and which backend a plan is for: this one, or one that is only named."""

from bundle.errors import EnvironmentUnfit, UsageError
from bundle.hardware import NAMES, Hardware, detect, preset


def machine(asked: str, backend: str | None, named: str | None) -> tuple[Hardware, tuple[str, ...]]:
    """The hardware to plan for and what is odd about it.

    `asked` is the recipe's backend, `backend` and `named` are the flags --backend and --hardware. A named
    machine wins over the recipe's backend, since the question is then what would happen there. Raises
    UsageError for flags that contradict each other, EnvironmentUnfit where this machine does not have the
    backend.
    """
    if named is None:
        try:
            return detect(backend or asked), ()
        except EnvironmentUnfit as error:
            hint = f"to plan for another machine: --hardware {'|'.join(NAMES)}"
            raise EnvironmentUnfit(f"{error}\n{hint}") from error
    hardware = preset(named)
    notes = [f"for {named}: neither this machine nor the files of the job were looked at"]
    if backend not in (None, "auto", hardware.backend):
        raise UsageError(f"--hardware {named} is a machine for {hardware.backend}, --backend says {backend}")
    if backend is None and asked not in ("auto", hardware.backend):
        note = f"the recipe says backend: {asked}; on {named} the command says otherwise"
        notes.append(note)
    return hardware, tuple(notes)
