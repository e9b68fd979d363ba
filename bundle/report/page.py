"""The page: one HTML file that needs no network, its curves drawn by plotly, its text escaped by jinja."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bundle.errors import EnvironmentUnfit, bytes_shown
from bundle.patches.catalogue import PATCHES
from bundle.recipe import flat
from bundle.report.run import Run

# Title of a chart -> beginnings of the names of the numbers on it. What fits nowhere gets a chart of its own.
CHARTS: Mapping[str, tuple[str, ...]] = {
    "Loss, nats per token": ("train/loss", "validation/loss"),
    "Losses of multi-token prediction, nats per token": ("train/mtp_", "validation/mtp_"),
    "Norm of the gradient": ("train/grad_norm",),
    "Learning rate": ("train/learning_rate",),
    "Tokens a second": ("train/tokens_per_second",),
    "Time, seconds": ("train/step_seconds", "seconds/"),
    "Model TFLOP/s of a device": ("train/tflops",),
    "Model FLOPs utilisation (MFU)": ("train/mfu",),
    "Time left, seconds": ("train/seconds_left",),
    "Memory, bytes": ("memory/",),
}
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf")
_DASHES = ("solid", "dash", "dot", "dashdot")


def render(runs: Sequence[Run]) -> str:
    """The page of these runs, side by side. Raises EnvironmentUnfit without the libraries that draw it."""
    try:
        import jinja2
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        raise EnvironmentUnfit(
            f"{error.name} is not installed, which draws the page: pip install 'mcore-bundle[report]'"
        ) from error
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template("page.html").render(
        runs=runs,
        names=labels(runs),
        charts=list(_charts(runs)),
        summary=list(_summary(runs)),
        differing=list(_differing(runs)),
        versions=list(_rows([_versions(run) for run in runs])),
        why={patch.id: patch.why for patch in PATCHES},
        plotly=get_plotlyjs(),
    )


def labels(runs: Sequence[Run]) -> list[str]:
    """A name for each run, by which the page tells them apart."""
    names = [run.name for run in runs]
    return [name if names.count(name) == 1 else f"{name} ({at + 1})" for at, name in enumerate(names)]


def grouped(names: Iterable[str]) -> dict[str, list[str]]:
    """The numbers on each chart, in the order of `CHARTS`; others under their own name."""
    groups: dict[str, list[str]] = {title: [] for title in CHARTS}
    for name in sorted(names):
        title = next((t for t, starts in CHARTS.items() if name.startswith(starts)), name)
        groups.setdefault(title, []).append(name)
    return {title: found for title, found in groups.items() if found}


def _charts(runs: Sequence[Run]) -> Iterator[tuple[str, str]]:
    """Title and HTML of each chart. A colour is a number, a dash is a run."""
    import plotly.graph_objects as go

    for title, numbers in grouped({name for run in runs for name in run.curves}).items():
        figure = go.Figure(layout={"height": 320, "margin": {"l": 60, "r": 10, "t": 10, "b": 40}})
        for colour, number in enumerate(numbers):
            for dash, (run, label) in enumerate(zip(runs, labels(runs), strict=True)):
                if number not in run.curves:
                    continue
                curve = run.curves[number].drawn()
                figure.add_scatter(
                    x=curve.steps,
                    y=curve.values,
                    name=number if len(runs) == 1 else f"{number}, {label}",
                    mode="lines" if len(curve.steps) > 1 else "markers",
                    line={
                        "color": _COLOURS[colour % len(_COLOURS)],
                        "dash": _DASHES[dash % len(_DASHES)],
                        "width": 1.5,
                    },
                )
        figure.update_layout(showlegend=True, legend={"orientation": "h", "y": -0.2}, template="plotly_white")
        figure.update_xaxes(title_text="step")
        yield title, figure.to_html(full_html=False, include_plotlyjs=False)


def _summary(runs: Sequence[Run]) -> Iterator[tuple[str, list[str]]]:
    """What each run was and came to: a row per fact, a column per run."""
    return _rows([_facts(run) for run in runs])


def _facts(run: Run) -> dict[str, Any]:
    axes = run.planned("layout", "axes") or {}
    sizes = {name: axis.get("size") for name, axis in axes.items() if isinstance(axis, dict)}
    last = max(step for curve in run.curves.values() for step in curve.steps)
    stages = [stage.get("bytes", {}).get("total") for stage in run.planned("stages") or []]
    totals = [total for total in stages if total]
    steps = run.planned("recipe", "train", "steps")
    return {
        "Steps": str(last) + (f" of {steps}" if steps else "") + ("" if run.result else ", not finished"),
        "Ended by": run.result.get("ended"),
        "Loss at the end": run.result.get("loss"),
        "Layout": " ".join(f"{name}{size}" for name, size in sizes.items() if size and size > 1)
        or "one rank",
        "Ranks": run.planned("layout", "world"),
        "Hardware": ", ".join(sorted({d.get("name", "?") for d in run.planned("hardware", "devices") or []}))
        or run.planned("hardware", "backend"),
        "megatron-core": run.planned("megatron", "version"),
        "Attention": run.planned("attention", "value"),
        "Planned memory of a device": bytes_shown(max(totals)) if totals else None,
        "Patches applied": sum(row.get("action") == "APPLY" for row in run.planned("patches") or []),
    }


def _versions(run: Run) -> dict[str, Any]:
    return {
        name: f"{found.get('version')}" + (f" ({found['commit']})" if found.get("commit") else "")
        for name, found in run.versions.items()
        if isinstance(found, dict)
    }


def _rows(columns: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    for name in dict.fromkeys(name for column in columns for name in column):
        values = [column.get(name) for column in columns]
        yield name, ["" if value is None else str(value) for value in values]


def _differing(runs: Sequence[Run]) -> Iterator[tuple[str, list[str]]]:
    """The recipe's keys whose values are not the same in all runs."""
    for name, values in _rows([dict(flat(run.planned("recipe") or {})) for run in runs]):
        if len(set(values)) > 1:
            yield name, values
