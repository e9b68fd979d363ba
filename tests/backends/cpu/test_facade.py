"""The facade: exact installation, nothing of it outside megatron's calls."""

import logging
import subprocess
import sys
import threading
import types
from contextlib import nullcontext

import pytest
import torch

from bundle.backends.cpu import facade
from bundle.backends.cpu.facade import megatron_calls
from bundle.capabilities.cpu import REPLACEMENT_REASON_BY_TORCH_NAME
from bundle.errors import EnvironmentUnfit


@pytest.fixture(autouse=True)
def _off():
    """Another test of this process may have left the facade on: importing megatron installs it."""
    facade.uninstall()
    yield
    facade.uninstall()


def everything() -> dict[str, dict[str, object]]:
    """Every attribute of every module of torch that could be touched, by identity."""
    owners = {n: m for n, m in sys.modules.items() if n == "torch" or n.startswith("torch.cuda")}
    owners |= {
        "torch.Tensor": torch.Tensor,
        "torch.nn.Module": torch.nn.Module,
        "torch.autograd": torch.autograd,
        "torch.distributed": torch.distributed,
    }
    return {name: dict(vars(owner)) for name, owner in owners.items()}


def changed(before, after) -> set[str]:
    return {
        f"{owner}:{name}"
        for owner in before
        for name in before[owner].keys() | after[owner].keys()
        if before[owner].get(name) is not after[owner].get(name)
    }


def test_install_replaces_what_is_declared_and_uninstall_restores_every_object():
    import torch._dynamo  # an import is not a replacement

    before = everything()
    facade.install()
    facade.install()
    assert changed(before, everything()) == set(REPLACEMENT_REASON_BY_TORCH_NAME)
    assert not torch.cuda.is_available()
    facade.uninstall()
    facade.uninstall()
    assert changed(before, everything()) == set()


def test_a_stranger_on_top_is_not_overwritten(monkeypatch, messages):
    facade.install()
    ours = torch.cuda.synchronize
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with pytest.raises(EnvironmentUnfit, match="cuda:synchronize") as error:
        facade.uninstall()
    messages(error.value)
    assert facade.is_installed() and torch.cuda.current_device() == torch.device("cpu")
    torch.cuda.synchronize = ours
    facade.uninstall()


def test_a_gpu_or_a_megatron_that_came_first_is_refused(monkeypatch, messages):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(EnvironmentUnfit, match="CUDA") as error:
        facade.install()
    assert "CUDA_VISIBLE_DEVICES" in str(error.value)
    messages(error.value)
    monkeypatch.undo()
    early = types.SimpleNamespace(jit_fuser=torch.compile)
    monkeypatch.setitem(sys.modules, "megatron.core.jit", early)
    with pytest.raises(EnvironmentUnfit, match="megatron") as error:
        facade.install()
    messages(error.value)
    assert not facade.is_installed()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(2, device="cuda"),
        lambda: torch.ones(2, device="cuda:1"),
        lambda: torch.ones(2, device=torch.device("cuda", 0)),
        lambda: torch.ones(2, device=0),
        lambda: torch.ones(2, device=torch.cuda.current_device()),
        lambda: torch.tensor([1.0, 1.0], pin_memory=True).cuda(non_blocking=True),
        lambda: torch.ones(2).to("cuda", non_blocking=True),
        lambda: torch.ones(2).to(device="cuda"),
        lambda: torch.ones(2).to(0),
        lambda: torch.nn.Linear(2, 2).cuda().weight.new_ones(2, device="cuda"),
        lambda: torch.ones(2).type("torch.cuda.FloatTensor"),
        lambda: torch.ones_like(torch.ones(2), device="cuda").pin_memory(),
    ],
)
def test_cuda_means_cpu_in_megatron_calls(megatron, make):
    assert torch.equal(make(), torch.ones(2))
    assert make().device == torch.device("cpu")


def test_devices_and_types_as_megatron_spells_them(megatron):
    assert torch.device("cuda") == torch.device("cuda", 1) == torch.device(type="cuda") == torch.device("cpu")
    assert torch.device("meta").type == "meta" and torch.ones(1, device="meta").is_meta
    assert torch.ones(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
    assert torch.ones(1).type(torch.int64).dtype == torch.int64
    assert torch.ones(1).to(torch.float64).dtype == torch.float64


def test_outside_megatron_calls_torch_is_the_torch_it_was():
    facade.install()
    with megatron_calls():
        pass
    assert torch.device("cuda").type == "cuda" and torch.ones(1).type() == "torch.FloatTensor"
    with pytest.raises(AssertionError, match="not compiled"):
        torch.ones(1, device="cuda")
    torch.manual_seed(3)
    state = torch.get_rng_state()
    torch.cuda.manual_seed(4)
    assert torch.equal(torch.get_rng_state(), state)
    facade.uninstall()
    with pytest.raises(AssertionError, match="not compiled"):
        torch.cuda.current_device()


def test_megatron_calls_nest_survive_exceptions_and_decorate():
    @megatron_calls()
    def again(depth: int) -> torch.Tensor:
        return again(depth - 1) if depth else torch.ones(1, device="cuda")

    with pytest.raises(ZeroDivisionError), megatron_calls(), megatron_calls():
        again(3)
        raise ZeroDivisionError
    with pytest.raises(AssertionError):
        torch.ones(1, device="cuda")


def test_backward_keeps_the_context_for_hooks_and_recomputation(megatron):
    class OnCuda(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * torch.full((1,), 2.0, device="cuda")

    seen = []
    x = torch.ones(3, requires_grad=True)
    x.register_hook(lambda g: seen.append(torch.zeros(1, device="cuda")))
    with megatron_calls():
        y = torch.utils.checkpoint.checkpoint(
            lambda x: OnCuda.apply(x) + torch.zeros(1, device="cuda"), x, use_reentrant=True
        )
        y.backward(torch.ones(3), retain_graph=True)
        torch.autograd.backward(y, torch.ones(3))
    assert torch.equal(x.grad, torch.full((3,), 4.0)) and len(seen) == 2


def test_the_context_belongs_to_a_thread():
    outcome = {}

    def work(name, context):
        try:
            with context:
                outcome[name] = torch.ones(1, device="cuda").device.type
        except AssertionError as error:
            outcome[name] = str(error)

    with megatron_calls():
        for name, context in (("bare", nullcontext()), ("entered", megatron_calls())):
            thread = threading.Thread(target=work, args=(name, context))
            thread.start()
            thread.join(10)
    assert outcome["entered"] == "cpu" and "not compiled" in outcome["bare"]


def test_random_states_are_the_cpus(megatron):
    torch.cuda.manual_seed(7)
    state, first = torch.cuda.get_rng_state(), torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    assert torch.cuda.default_generators[torch.cuda.current_device()] is torch.default_generator
    torch.manual_seed(7)
    assert torch.equal(torch.rand(3), first)


def test_one_generator_is_no_reason_to_warn(caplog):
    log = logging.getLogger("megatron.core.tensor_parallel.random")
    facade.install()
    log.warning("CPU RNG state changed within GPU RNG context")
    log.warning("something else")
    facade.uninstall()
    log.warning("CPU RNG state changed within GPU RNG context")
    assert [record.msg.split()[0] for record in caplog.records] == ["something", "CPU"]


def test_streams_and_events_keep_the_interface(megatron):
    stream, start, end = (
        torch.cuda.Stream(priority=-1),
        torch.cuda.Event(enable_timing=True),
        torch.cuda.Event(),
    )
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.cuda.device(0):
        start.record()
    end.record(stream)
    torch.cuda.current_stream().wait_event(stream.record_event())
    torch.cuda.synchronize()
    assert end.query() and start.elapsed_time(end) >= 0


def test_only_megatron_is_not_compiled():
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph

    def theirs(x):
        return x + 1

    def megatrons(x):
        return x + 2

    megatrons.__module__ = "megatron.core.fusions.fused_bias_swiglu"
    facade.install()
    jit_fuser = torch.compile  # what megatron.core.jit binds when it is imported
    decorated, other = jit_fuser(megatrons, backend=backend), torch.compile(backend=backend)(theirs)
    assert decorated(torch.ones(1)).item() == 3 and compiled == [] and decorated.__wrapped__ is megatrons
    assert other(torch.ones(1)).item() == 2 and len(compiled) == 1
    facade.uninstall()
    assert decorated(torch.ones(1)).item() == 3 and len(compiled) == 2
    torch._dynamo.reset()


TRANSFORMERS = """
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from bundle.backends.cpu import facade

config = Qwen3Config(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2, head_dim=8)
torch.manual_seed(0)
model = Qwen3ForCausalLM(config)
ids = torch.arange(24).view(2, 12)
def run():
    assert not torch.cuda.is_available() and torch.cuda.device_count() == 0
    model.zero_grad()
    out = model(ids, labels=ids)
    out.loss.backward()
    torch.manual_seed(1)
    text = model.generate(ids[:1], max_new_tokens=8, do_sample=True, pad_token_id=0)
    assert model.device.type == "cpu"
    return [out.logits, text, *(p.grad.clone() for p in model.parameters())]
before = run()
facade.install()
import megatron.core
with facade.megatron_calls():
    torch.ones(1, device="cuda")
during = run()
facade.uninstall()
after = run()
assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(before, during, after, strict=True))
print("equal", len(before))
"""


def test_transformers_in_the_same_process_is_untouched():
    pytest.importorskip("transformers")
    pytest.importorskip("megatron.core")
    run = subprocess.run([sys.executable, "-c", TRANSFORMERS], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "equal" in run.stdout
