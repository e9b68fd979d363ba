"""What a container needs of its host for devices, whichever engine starts it."""

RDMA_DEVICES = "/dev/infiniband"
# Of Ascend what cann-container-image's README mounts; that was read, not run.
# The driver stays on the host; nobody writes to these files of it.
NPU_DRIVER = (
    "/usr/local/dcmi",
    "/usr/local/bin/npu-smi",
    "/usr/local/Ascend/driver/lib64",
    "/usr/local/Ascend/driver/version.info",
    "/etc/ascend_install.info",
)
_SHARED_NPU_NODES = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")


def list_npu_device_files(count: int) -> tuple[str, ...]:
    """The device nodes of so many NPUs, the first ones of the host, and those that all of them share."""
    return (*(f"/dev/davinci{number}" for number in range(count)), *_SHARED_NPU_NODES)
