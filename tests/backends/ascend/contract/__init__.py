"""npu_fusion_attention as its documentation describes it, in torch: the rules, the result, the registration.

Emulated: it says nothing about the accuracy, the error texts, the speed or the dropout of the real kernel.
"""

from tests.backends.ascend.contract.attention import npu_fusion_attention
from tests.backends.ascend.contract.registration import SCHEMA, registered
from tests.backends.ascend.contract.rules import ContractViolation

__all__ = ["SCHEMA", "ContractViolation", "npu_fusion_attention", "registered"]
