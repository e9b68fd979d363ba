"""One page about a run, or about several side by side: curves, plan, patches, versions.

It needs no network: the library that draws its curves, plotly, lies beside it. Its text is escaped by jinja.
The files of a run directory are data from outside: bounded, most may be missing.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bundle.errors import EnvironmentUnfit, UsageError, format_bytes
from bundle.files import read_content, write_text
from bundle.patches.catalogue import PATCHES
from bundle.recipe import flatten
from bundle.report.reading import parse_json_or_none
from bundle.report.samples import SampleAnswer, read_sample_selection

# The most points of a drawn curve. From a longer one, the lowest and highest of each stretch are drawn.
MAX_POINTS = 800
_SIGNIFICANT_DIGITS = 6  # that are significant, of a value in a curve
# The file beside a page that draws its curves.
LINKED_PLOTTING_LIBRARY_FILE = "plotly.min.js"
_METRICS_LIMIT, _FILE_LIMIT = (
    1 << 28,
    1 << 24,
)  # bytes of metrics.jsonl (millions of reports), and of any other file


@dataclass(frozen=True)
class Curve:
    """One metric over the steps of a run, in the order of steps."""

    steps: tuple[int, ...]
    values: tuple[float, ...]

    def downsample_to_extremes(self) -> "Curve":
        """Return the curve with at most `MAX_POINTS` points."""
        count = len(self.steps)
        if count <= MAX_POINTS:
            return self
        length = -(-2 * count // MAX_POINTS)
        stretches = (range(at, min(at + length, count)) for at in range(0, count, length))
        indices = sorted({pick(s, key=self.values.__getitem__) for s in stretches for pick in (min, max)})
        return Curve(tuple(self.steps[at] for at in indices), tuple(self.values[at] for at in indices))


@dataclass(frozen=True)
class RunReport:
    """The content of a run directory that a page shows."""

    name: str
    curves: Mapping[str, Curve]
    plan: Mapping[str, Any]
    versions: Mapping[str, Any]
    result: Mapping[str, Any]
    unread: tuple[str, ...]  # messages about files that could not be read
    samples: tuple[SampleAnswer, ...] = ()  # of task rl

    def find_plan_value(self, *keys: str) -> Any:
        """Return a value of the plan by its keys; None where there is none."""
        value: Any = self.plan
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value


def read_run(directory: Path) -> RunReport:
    """Return the run in `directory`. Raise UsageError where no run has reported anything."""
    unread: list[str] = []
    numbers = directory / "metrics.jsonl"
    try:
        curves = _read_curves(read_content(numbers, _METRICS_LIMIT), unread)
    except OSError as error:
        raise UsageError(
            f"{numbers}: {error.strerror or error}. Give the directory of a run, such as runs/NAME."
        ) from error
    if not curves:
        raise UsageError(f"{numbers}: no metrics yet. A run writes them every train.log_interval steps.")
    job, versions, result = (
        _read_object(directory / f"{name}.json", unread) for name in ("job", "versions", "result")
    )
    plan = job.get("plan")
    planned = {**(plan if isinstance(plan, dict) else {}), "recipe": job.get("recipe")} if job else {}
    samples = read_sample_selection(directory, unread)
    run = RunReport(directory.resolve().name, curves, planned, versions, result, tuple(unread), samples)
    if _has_valid_plan(run):
        return run
    return replace(run, plan={}, unread=(*unread, "job.json: not in the format of a job file"))


def _has_valid_plan(run: RunReport) -> bool:
    """Return whether the parts of a plan that a page shows have the form that a launcher writes."""
    try:
        _summarize_run(run)
        dict(flatten(run.find_plan_value("recipe") or {}))
        for row in run.find_plan_value("patches") or []:
            row["id"], row["action"], row["reason"]
    except (AttributeError, LookupError, TypeError, ValueError):
        return False
    return True


def _read_curves(data: bytes, unread: list[str]) -> dict[str, Curve]:
    """Return the curves of a metrics.jsonl; the last report of a step counts, as a resume repeats steps."""
    seen: dict[str, dict[int, float]] = {}
    broken = 0
    for line in data.splitlines():
        report = parse_json_or_none(line)
        step = report.pop("step", None) if isinstance(report, dict) else None
        if type(step) is not int:
            broken += bool(line.strip())
            continue
        for name, value in report.items():
            if name != "time" and type(value) in (int, float):
                try:
                    seen.setdefault(name, {})[step] = float(value)
                except OverflowError:  # an integer beyond all floats
                    broken += 1
    if broken:
        unread.append(f"metrics.jsonl: lines or values that cannot be read: {broken}")
    return {name: Curve(*zip(*sorted(values.items()), strict=True)) for name, values in seen.items()}


def _read_object(path: Path, unread: list[str]) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one where there is no file, or no object in it."""
    try:
        document = parse_json_or_none(read_content(path, _FILE_LIMIT))
    except FileNotFoundError:
        return {}
    except OSError as error:
        unread.append(f"{path.name}: {error.strerror or error}")
        return {}
    if not isinstance(document, dict):
        unread.append(f"{path.name}: not a JSON object")
        return {}
    return document


_MEMORY_CHART_TITLE = "Memory, GiB"
# The beginnings of the metrics' names by the title of a chart. Any other metric gets its own chart.
CHART_METRIC_PREFIXES: Mapping[str, tuple[str, ...]] = {
    "Reward": ("reward/mean", "evaluation/reward"),
    "Accuracy on questions that are not learned": ("evaluation/accuracy", "evaluation/pass@"),
    "Tokens of an answer": ("completions/m", "evaluation/mean_length"),
    "Shares of groups and answers": ("groups/flat", "groups/small", "completions/truncated"),
    "Entropy, nats": ("train/entropy",),
    "Mismatch of rollout engine and trainer": ("train/mismatch/",),
    "Shares of clipped tokens": ("train/clip_fraction/",),
    "Loss, nats per token": ("train/loss", "validation/loss"),
    "Losses of multi-token prediction, nats per token": ("train/mtp_", "validation/mtp_"),
    "Rewards of preferences": ("train/rewards/", "validation/rewards/"),
    "Norm of the gradient": ("train/grad_norm",),
    "Learning rate": ("train/learning_rate",),
    "Tokens a second": ("train/tokens_per_second",),
    "Time, seconds": ("train/step_seconds", "seconds/", "rollout/seconds", "reward/seconds"),
    "Model TFLOP/s of a device": ("train/tflops",),
    "Model FLOPs utilisation (MFU)": ("train/mfu",),
    _MEMORY_CHART_TITLE: ("memory/",),
}
# Numbers of a run that say nothing as a curve.
_METRICS_WITHOUT_CHART = ("train/seconds_left", "train/samples")
_LINE_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf")
_LINE_DASHES = ("solid", "dash", "dot", "dashdot")


def render_page(runs: Sequence[RunReport]) -> str:
    """Return the page of these runs, side by side, which needs LINKED_PLOTTING_LIBRARY_FILE beside it.

    Raise EnvironmentUnfit without the libraries that make it.
    """
    try:
        import jinja2
        import plotly.graph_objects  # noqa: F401  `_draw_charts` needs it
    except ModuleNotFoundError as error:
        raise EnvironmentUnfit(
            f"{str(error.name).partition('.')[0]}, which draws the page, is not installed. Install it with"
            " pip install 'mcore-bundle[report]'."
        ) from error
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template("page.html").render(
        runs=runs,
        names=label_runs(runs),
        charts=list(_draw_charts(runs)),
        summary=list(_build_rows([_summarize_run(run) for run in runs])),
        differing=list(_find_differences(runs)),
        versions=list(_build_rows([_format_versions(run) for run in runs])),
        why={patch.id: patch.why for patch in PATCHES},
        library=LINKED_PLOTTING_LIBRARY_FILE,
    )


def write_page(path: Path, runs: Sequence[RunReport]) -> None:
    """Write the page of these runs, and the library that it needs beside it.

    Raise EnvironmentUnfit without the libraries that make them.
    """
    page = render_page(runs)
    from plotly.offline import get_plotlyjs

    write_text(path.with_name(LINKED_PLOTTING_LIBRARY_FILE), get_plotlyjs())
    write_text(path, page)


def label_runs(runs: Sequence[RunReport]) -> list[str]:
    """Return a label for each run that no other run on the page has."""
    names = [run.name for run in runs]
    return [name if names.count(name) == 1 else f"{name} ({at + 1})" for at, name in enumerate(names)]


def group_metrics_by_chart(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the numbers on each chart, in the order of `CHART_METRIC_PREFIXES`; others by their own name."""
    groups: dict[str, list[str]] = {title: [] for title in CHART_METRIC_PREFIXES}
    for name in sorted({*names} - {*_METRICS_WITHOUT_CHART}):
        title = next((t for t, starts in CHART_METRIC_PREFIXES.items() if name.startswith(starts)), name)
        groups.setdefault(title, []).append(name)
    return {title: members for title, members in groups.items() if members}


def _draw_charts(runs: Sequence[RunReport]) -> Iterator[tuple[str, str]]:
    """Yield the title and the HTML of each chart. Each metric has its colour, each run its dash."""
    import plotly.graph_objects as go

    for title, numbers in group_metrics_by_chart({name for run in runs for name in run.curves}).items():
        figure = go.Figure(layout={"height": 320, "margin": {"l": 60, "r": 10, "t": 10, "b": 40}})
        for colour, number in enumerate(numbers):
            for dash, (run, label) in enumerate(zip(runs, label_runs(runs), strict=True)):
                if number not in run.curves:
                    continue
                curve = run.curves[number].downsample_to_extremes()
                unit = 2.0**30 if title == _MEMORY_CHART_TITLE else 1.0
                figure.add_scatter(
                    x=curve.steps,
                    y=[float(f"{value / unit:.{_SIGNIFICANT_DIGITS}g}") for value in curve.values],
                    name=number if len(runs) == 1 else f"{number}, {label}",
                    mode="lines" if len(curve.steps) > 1 else "markers",
                    line={
                        "color": _LINE_COLOURS[colour % len(_LINE_COLOURS)],
                        "dash": _LINE_DASHES[dash % len(_LINE_DASHES)],
                        "width": 1.5,
                    },
                )
        figure.update_layout(showlegend=True, legend={"orientation": "h", "y": -0.2}, template="plotly_white")
        figure.update_xaxes(title_text="step")
        yield title, figure.to_html(full_html=False, include_plotlyjs=False)


def _summarize_run(run: RunReport) -> dict[str, Any]:
    """Return the facts of a run for the page's table: steps, loss, layout, hardware and versions."""
    axes = run.find_plan_value("layout", "axes") or {}
    sizes = {name: axis.get("size") for name, axis in axes.items() if isinstance(axis, dict)}
    last = max(step for curve in run.curves.values() for step in curve.steps)
    stages = [stage.get("bytes", {}).get("total") for stage in run.find_plan_value("stages") or []]
    totals = [total for total in stages if total]
    steps, loss = run.find_plan_value("recipe", "train", "steps"), run.result.get("loss")
    return {
        "Steps": str(last) + (f" of {steps}" if steps else "") + ("" if run.result else ", not finished"),
        "Ended by": run.result.get("ended"),
        "Loss at the end": f"{loss:.{_SIGNIFICANT_DIGITS}g}" if isinstance(loss, int | float) else loss,
        "Layout": " ".join(f"{name}{size}" for name, size in sizes.items() if size and size > 1)
        or "one rank",
        "Ranks": run.find_plan_value("layout", "world"),
        "Hardware": ", ".join(
            sorted({d.get("name", "?") for d in run.find_plan_value("hardware", "devices") or []})
        )
        or run.find_plan_value("hardware", "backend"),
        "megatron-core": run.find_plan_value("megatron", "version"),
        "Attention": run.find_plan_value("attention", "value"),
        "Planned memory of a device": format_bytes(max(totals)) if totals else None,
        "Patches applied": sum(row.get("action") == "APPLY" for row in run.find_plan_value("patches") or []),
    }


def _format_versions(run: RunReport) -> dict[str, Any]:
    return {
        name: f"{package.get('version')}" + (f" ({package['commit']})" if package.get("commit") else "")
        for name, package in run.versions.items()
        if isinstance(package, dict)
    }


def _build_rows(columns: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    """Yield a row per fact, with a column per run."""
    for name in dict.fromkeys(name for column in columns for name in column):
        values = [column.get(name) for column in columns]
        yield name, ["" if value is None else str(value) for value in values]


def _find_differences(runs: Sequence[RunReport]) -> Iterator[tuple[str, list[str]]]:
    """Yield the recipe's keys whose values differ between runs, with the values."""
    for name, values in _build_rows([dict(flatten(run.find_plan_value("recipe") or {})) for run in runs]):
        if len(set(values)) > 1:
            yield name, values
