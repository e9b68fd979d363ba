"""The kernels of one step of `mcore-bundle train`, and whether each large one is expected.

python -m benchmarks.gpu.kernels [--only CASE...] [--all]

Trains models of real widths and a vocabulary of 151,936 on drawn rows: SFT, LoRA, DPO, multi-token
prediction, experts and a vision-language model, in packs. A trace of one step (`profile.steps`) has the time
of every kernel and the operator that launched it. Ends with 1 where a kernel that `EXPECTED` does not name
takes more than `LIMIT` of the time of all kernels. `--all` prints every kernel above 1 %.
"""

import argparse
import gzip
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu.vision import load_digits_program

LIMIT = 0.03
STEP = 4  # the first ones compile
ROWS, WORDS, IMAGE = 256, (200, 1500), 448  # rows of a file, words of an answer, pixels of a side
HERE = Path(__file__).parent
WIDE, LATENT, SEEING = (str(HERE / f"{name}.yaml") for name in ("adapters", "latent", "seeing"))
_VOCABULARY = "model.config.vocab_size=151936"
_FEW_LAYERS = ("model.config.num_hidden_layers=4", "train.global_batch_size=2")
_PACKS = ("data.packed=true", "train.micro_batch_size=1", "data.sequence_length=8192")
_CHATS = ("task=sft", "data.source=jsonl", "data.path=[{rows}/chats.jsonl]", "data.separator=null")
_PAIRS = ("task=dpo", "data.source=jsonl", "data.path=[{rows}/pairs.jsonl]", "data.separator=null")
_IMAGES = (
    "data.sequence_length=3072",  # what a device of 80 GiB holds
    "data.path=[{rows}/images.jsonl]",
    "data.tokenizer=hf:{rows}/tokenizer",
    "model.config.image_token_id=259",
    "model.config.vision_start_token_id=258",
    "model.config.vision_end_token_id=260",
)
CASES: Mapping[str, tuple[str, ...]] = {
    "sft": (WIDE, *_FEW_LAYERS, *_CHATS, "model.lora=null"),
    "lora": (WIDE, *_FEW_LAYERS, *_CHATS),
    "dpo": (WIDE, *_FEW_LAYERS, *_PAIRS, "model.lora=null"),
    "mtp": (WIDE, *_FEW_LAYERS, "model.lora=null", "model.mtp.layers=1"),
    "experts": (
        LATENT,
        *_PACKS,
        _VOCABULARY,
        "model.config.max_position_embeddings=8192",
        "model.mtp.layers=0",
    ),
    "vision": (SEEING, *_IMAGES, _VOCABULARY, "model.config.tie_word_embeddings=false"),
}
_ALIKE = (
    "data.validation=0",
    f"train.steps={STEP}",
    f"profile.steps=[{STEP},{STEP}]",
    "train.eval_interval=0",
    "optimizer.warmup_steps=0",
)
# Patterns of "operator: kernel" by what a step spends the time on.
EXPECTED: Mapping[str, str] = {
    "products": r"(?!aten::(bmm|baddbmm):).*: .*(nvjet|gemm|xmma|cutlass)",  # of few large matrices
    "attention": r".*: .*(cudnn|flash|fmha)",
    "norms": r".*: .*(norm|ln_(fwd|bwd))",
    "optimizer": r".*: .*(multi_tensor|adam)",
    "gradients added in fp32": r"aten::add_: .*CUDAFunctor_add<float>",
    "fused cross-entropy": r"triton_\w+(exp_sub|to_copy_copy|div_split|index_put_rsub)",
}
# What one kind of training has beside it.
EXPECTED_IN: Mapping[str, str] = {
    "lora": r"aten::add: .*CUDAFunctor_add<c10::BFloat16>",  # an adapter's output to the frozen one
    "dpo": r"aten::(sub|copy_|mul_|exp): ",  # log-probabilities, in fp32
    "vision": r"aten::mul: ",  # rotary embedding of the tower, which is transformers' own
}


class Kernel(NamedTuple):
    """A kernel's name and the operator that launched it."""

    operator: str
    name: str

    def is_expected(self, case: str) -> bool:
        """Return whether a pattern of every case, or of this one, matches."""
        patterns = [*EXPECTED.values(), *filter(None, [EXPECTED_IN.get(case)])]
        return any(re.match(pattern, f"{self.operator}: {self.name}") for pattern in patterns)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--all", action="store_true", help="print every kernel above 1 %%")
    options = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        write_rows(Path(folder))
        for name in options.only:
            failed |= not judge_case(name, Path(folder), least=0.01 if options.all else LIMIT)
    return int(failed)


def judge_case(name: str, rows: Path, *, least: float) -> bool:
    """Train a case, print its kernels above `least`, and return whether each above `LIMIT` is expected."""
    recipe, *changes = CASES[name]
    directory = rows / f"run-{name}"
    command = [sys.executable, "-m", "bundle", "train", recipe, "--run-directory", str(directory)]
    for change in (*changes, *_ALIKE):
        command += ["--set", change.replace("{rows}", str(rows))]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        print(f"FAILED {name}: the run", ended.stdout[-1500:], ended.stderr[-1500:], sep="\n", flush=True)
        return False
    (trace,) = (directory / "profile").glob("*.json.gz")
    milliseconds = read_kernels(trace)
    shutil.rmtree(directory)  # a checkpoint has 30 GiB
    whole = sum(milliseconds.values())
    large = {kernel: ms for kernel, ms in milliseconds.most_common() if ms > least * whole}
    wrong = [kernel for kernel, ms in large.items() if ms > LIMIT * whole and not kernel.is_expected(name)]
    print(f"{'FAILED' if wrong else 'ok':<7}{name}: {whole:.0f} ms of kernels", flush=True)
    for kernel, ms in large.items():
        sign = " " if kernel.is_expected(name) else "?"
        print(f"  {sign} {ms / whole:6.1%} {ms:8.1f} ms  {kernel.operator}: {kernel.name[:110]}", flush=True)
    return not wrong


def read_kernels(trace: Path) -> Counter[Kernel]:
    """Return the milliseconds of each kernel of a trace that torch's profiler wrote."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    operators = {
        event["args"]["External id"]: event["name"]
        for event in events
        if event.get("cat") == "cpu_op" and "External id" in event["args"]
    }
    milliseconds: Counter[Kernel] = Counter()
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            operator = operators.get(event["args"].get("External id"), "")
            milliseconds[Kernel(operator, event["name"])] += event["dur"] / 1000
    return milliseconds


def write_rows(directory: Path) -> None:
    """Write drawn chats, pairs and images with questions, with a tokenizer of bytes that knows images."""
    from PIL import Image

    draw = random.Random(0)
    chats, pairs, images = [], [], []
    for number in range(ROWS):
        question, answer, other = (_draw_text(draw, *count) for count in ((5, 40), WORDS, WORDS))
        asked = {"role": "user", "content": question}
        answered = {"role": "assistant", "content": answer}
        chats.append({"messages": [asked, answered]})
        pairs.append({"prompt": question, "chosen": answer[:3000], "rejected": other[:3000]})
        name = f"{number % 16}.png"
        if number < 16:
            Image.frombytes("RGB", (IMAGE, IMAGE), draw.randbytes(3 * IMAGE**2)).save(directory / name)
        seen = asked | {"content": f"<image>{question}"}
        images.append({"images": [name], "messages": [seen, answered | {"content": answer[:500]}]})
    for file, rows in (("chats", chats), ("pairs", pairs), ("images", images)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (directory / f"{file}.jsonl").write_text(lines, encoding="utf-8")
    program = load_digits_program()
    program.write_tokenizer(directory / "tokenizer")
    sizes = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    processing = program.PROCESSING | sizes | {"min_pixels": IMAGE**2, "max_pixels": IMAGE**2}
    (directory / "tokenizer" / "preprocessor_config.json").write_text(
        json.dumps(processing), encoding="utf-8"
    )


def _draw_text(draw: random.Random, least: int, most: int) -> str:
    letters = "etaoin shrdlu"
    return "".join(draw.choices(letters, k=draw.randint(least, most)))


if __name__ == "__main__":
    sys.exit(main())
