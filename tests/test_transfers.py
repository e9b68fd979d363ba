"""Copies between host and device; on a CPU, where both are one memory."""

import torch

from bundle.transfers import HostCopy, copy_to_device


def test_a_host_copy_keeps_the_values_of_its_moment():
    values = torch.randn(3, 5, dtype=torch.float64)
    wanted, copy = values.clone(), HostCopy(values)
    values.zero_()
    assert torch.equal(copy.read(), wanted) and torch.equal(copy.read(), wanted)


def test_values_on_the_device_are_not_copied_again():
    values = torch.arange(7)
    assert copy_to_device(values, torch.device("cpu")) is values
