"""What was said on a command line, whichever options its verb has."""

from collections.abc import Collection

import typer


def said(context: typer.Context) -> set[str]:
    """The names of the parameters that were given, rather than left at their defaults."""
    sources = {p.name: context.get_parameter_source(p.name) for p in context.command.params if p.name}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


def words_of(context: typer.Context, without: Collection[str]) -> list[str]:
    """The words that say the same to another verb that knows all of them but those in `without`."""
    words: list[str] = []
    for parameter in context.command.params:
        if parameter.name not in said(context) - set(without):
            continue
        value = context.params[parameter.name]
        flag = [] if parameter.param_type_name == "argument" else [parameter.opts[0]]
        if value is True:
            words += flag
        else:
            for one in value if isinstance(value, list | tuple) else [value]:
                words += [*flag, str(one)]
    return words
