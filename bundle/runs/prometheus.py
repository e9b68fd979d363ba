"""The metrics of a run for Prometheus: an endpoint of rank 0 with the latest values in OpenMetrics' text.

The format: prometheus.io/docs/specs/om/open_metrics_spec. The metric `train/loss` is the gauge
`mcore_bundle_train_loss`. A data set's name in the middle of a metric becomes the label `of`.
"""

import logging
import math
import re
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from bundle.errors import EnvironmentUnfit
from bundle.recipe.sections import PrometheusSection as PrometheusSection

_log = logging.getLogger(__name__)

OPENMETRICS_CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
PREFIX = "mcore_bundle_"
STEP, RESTARTS = "step", "restarts"
_INVALID_CHARACTERS = re.compile(r"[^a-zA-Z0-9_]")


class PrometheusSink:
    """A sink that serves the latest values at /metrics.

    `run` is the label of all values; `restarts` is the number of restarts of the run.
    """

    def __init__(self, settings: PrometheusSection, run: str, restarts: int) -> None:
        """Start the endpoint. Raise EnvironmentUnfit where its address cannot be used."""
        self._run, self._lock = run, threading.Lock()
        self._values: dict[str, tuple[int, float]] = {}
        self._latest: dict[str, float] = {RESTARTS: restarts}
        try:
            self._server = ThreadingHTTPServer((settings.address, settings.port), self._build_handler())
        except OSError as error:
            raise EnvironmentUnfit(
                f"metrics.prometheus: cannot listen on {settings.address}:{settings.port}:"
                f" {error.strerror}. Name another port or address"
            ) from error
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True).start()
        _log.info("metrics for Prometheus at http://%s:%d/metrics", settings.address, self.port)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Keep the values of a step until later values with the same names come."""
        with self._lock:
            self._latest |= {STEP: step, **values}

    def close(self) -> None:
        """Stop the endpoint."""
        self._server.shutdown()
        self._server.server_close()

    def render_text(self) -> str:
        """Return the text that the endpoint serves."""
        with self._lock:
            return format_exposition(self._latest, self._run)

    def _build_handler(self) -> type[BaseHTTPRequestHandler]:
        sink = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path.partition("?")[0] != "/metrics":
                    self.send_error(404)
                    return
                body = sink.render_text().encode()
                self.send_response(200)
                self.send_header("Content-Type", OPENMETRICS_CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Write no log of requests."""

        return Handler


def format_exposition(values: Mapping[str, float], run: str) -> str:
    """Return the values as OpenMetrics' text, each family once with its type."""
    families: dict[str, list[str]] = {}
    for key, value in values.items():
        name, data_set = parse_metric_key(key)
        labels = f'run="{_escape_label(run)}"' + (f',of="{_escape_label(data_set)}"' if data_set else "")
        families.setdefault(name, []).append(f"{name}{{{labels}}} {_format_number(value)}")
    lines = [line for name, samples in families.items() for line in (f"# TYPE {name} gauge", *samples)]
    return "\n".join([*lines, "# EOF"]) + "\n"


def parse_metric_key(key: str) -> tuple[str, str]:
    """Return the name of the metric `key` for Prometheus, and its data set, if any."""
    first, *between = key.split("/")
    last = between.pop() if between else ""
    if first == "data" and between:  # data/skipped/NAME
        between, last = [last], between[0]
    return _INVALID_CHARACTERS.sub("_", PREFIX + "_".join(filter(None, (first, last)))), "/".join(between)


def _format_number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return str(value) if math.isfinite(value) else f"{'+' if value > 0 else '-'}Inf"


def _escape_label(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
