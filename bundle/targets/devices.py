"""The files of its host that a container needs for devices, whichever engine starts it."""

RDMA_DEVICE_DIRECTORY = "/dev/infiniband"
# These are the mounts in the README of cann-container-image, which was read, not run.
# The driver stays on the host; no container writes to these files.
NPU_DRIVER_PATHS = (
    "/usr/local/dcmi",
    "/usr/local/bin/npu-smi",
    "/usr/local/Ascend/driver/lib64",
    "/usr/local/Ascend/driver/version.info",
    "/etc/ascend_install.info",
)
_SHARED_NPU_DEVICE_FILES = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")


def list_npu_device_files(count: int) -> tuple[str, ...]:
    """Return the device files of the first `count` NPUs of the host and those that all NPUs share."""
    return (*(f"/dev/davinci{number}" for number in range(count)), *_SHARED_NPU_DEVICE_FILES)
