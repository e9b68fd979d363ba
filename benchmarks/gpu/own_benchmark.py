"""SGLang's own benchmark of a server with random weights. Run by an environment with SGLang.

PYTHON own_benchmark.py DIRECTORY MODEL.json SEQUENCES TOKENS PART

Writes config.json from MODEL.json and a tokenizer into DIRECTORY. Starts a server that takes PART of the
memory of the GPU, and runs `sglang.bench_serving` for so many sequences of so many tokens, with their
log-probabilities. Prints the output tokens/s.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers  # type: ignore[import-not-found]
from transformers import PreTrainedTokenizerFast

PORT = "30999"
URL = f"http://127.0.0.1:{PORT}"


def main(directory: Path, config: str, sequences: str, tokens: str, part: str) -> None:
    """Print the output tokens/s; end with an error where the server does not start or a request fails."""
    directory.mkdir(parents=True, exist_ok=True)
    document = json.loads(Path(config).read_text())
    (directory / "config.json").write_text(json.dumps(document))
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(256)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(directory)
    model = ["--model-path", str(directory), "--load-format", "dummy", "--dtype", "bfloat16"]
    limits = ["--mem-fraction-static", part, "--cuda-graph-max-bs-decode", sequences]
    with (directory / "server.log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "sglang.launch_server", *model, *limits, "--port", PORT],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            wait_until_ready(server)
            size = ["--num-prompts", sequences, "--random-output-len", tokens, "--random-input-len", "29"]
            data = ["--dataset-name", "random-ids", "--random-range-ratio", "1.0", "--tokenize-prompt"]
            form = ["--model", str(directory), "--tokenizer", str(directory), "--disable-stream"]
            command = [sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang", "--base-url", URL]
            output = subprocess.run(
                [*command, *data, *size, *form, "--return-logprob"],
                capture_output=True,
                text=True,
                check=True,
                timeout=300,
            ).stdout
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
    (succeeded,) = re.findall(r"Successful requests: +(\d+)", output)
    assert succeeded == sequences, output
    print(re.findall(r"Output token throughput \(tok/s\): +([\d.]+)", output)[0])


def wait_until_ready(server: subprocess.Popen[bytes]) -> None:
    """Return when the server generates; raise RuntimeError where it ends first."""
    while server.poll() is None:
        try:
            urllib.request.urlopen(f"{URL}/health_generate", timeout=5).close()
        except OSError:
            time.sleep(1)
        else:
            return
    raise RuntimeError(f"the server ended with {server.returncode}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
