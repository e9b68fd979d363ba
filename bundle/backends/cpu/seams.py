"""What the cpu runtime replaces in torch, as data: `patches list` shows it as kind *facade* (no torch)."""

from bundle.frozen import frozen


@frozen
class FacadeSeam:
    """One attribute of torch that the facade replaces while it is installed."""

    target: str  # "module:attribute"
    why: str


# Everything that megatron-core 0.12 .. 0.19 asks of torch.cuda on the way of a training step or a checkpoint
# and that torch answers wrongly or with an exception where there is no GPU. Nothing else: is_available(),
# device_count() and the memory figures tell the truth already.
FACADE = (
    FacadeSeam(
        "torch.cuda:current_device", "every buffer and every random state is placed on it: it is the cpu"
    ),
    FacadeSeam("torch.cuda:device", "tensor_parallel.random enters it to seed a device"),
    FacadeSeam(
        "torch.cuda:synchronize", "timers, dispatchers and checkpoints wait for the device: cpu work is done"
    ),
    FacadeSeam(
        "torch.cuda:Stream", "DDP, dispatchers and offloading create side streams: there is one order here"
    ),
    FacadeSeam("torch.cuda:Event", "overlap and timers record events: nothing is pending on a cpu"),
    FacadeSeam("torch.cuda:current_stream", "p2p and dispatchers wait on it: there is one order here"),
    FacadeSeam("torch.cuda:stream", "overlap code runs inside a stream's context: there is one order here"),
    FacadeSeam(
        "torch.cuda:default_generators",
        "tensor_parallel.random takes the device's generator: it is the cpu's",
    ),
    FacadeSeam(
        "torch.cuda:manual_seed", "the random tracker seeds its streams through it; torch would only queue it"
    ),
    FacadeSeam("torch.cuda:get_rng_state", "the random tracker and recomputation save it: it is the cpu's"),
    FacadeSeam(
        "torch.cuda:set_rng_state", "the random tracker and recomputation restore it: it is the cpu's"
    ),
    FacadeSeam(
        "torch.cuda.random:get_rng_state", "tensor_parallel.random reads it by this name: it is the cpu's"
    ),
    FacadeSeam(
        "torch.cuda:_lazy_call", "tensor_parallel.random defers seeding until CUDA starts: here it is at once"
    ),
    FacadeSeam("torch.cuda:_lazy_init", "imported by tensor_parallel.random: there is no CUDA to start"),
    FacadeSeam(
        "torch.autograd:_engine_run_backward",
        "hooks and recomputation during backward are megatron's calls too",
    ),
    FacadeSeam(
        "torch:compile", "megatron's jit_fuser: its functions run eagerly, everybody else's are compiled"
    ),
)
