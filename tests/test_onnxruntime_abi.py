"""The execution provider's view of onnxruntime's C ABI: each function and member where API 23 has it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from coda_edge.onnxruntime.build import NATIVE

HEADER = NATIVE / "ep" / "ep_api.h"
# Counted in pointers from the start of each structure of the official headers of onnxruntime 1.23.
SLOTS = {
    "OrtEpApi": {"CreateEpDevice": 0, "EpGraphSupportInfo_AddNodesToFuse": 2},
    "OrtModelEditorApi": {"CreateNode": 6},
    "OrtApi": {
        "CreateStatus": 0,
        "GetErrorMessage": 2,
        "GetTensorMutableData": 51,
        "CastTypeInfoToTensorInfo": 55,
        "GetTensorElementType": 60,
        "GetDimensionsCount": 61,
        "GetDimensions": 62,
        "GetTensorTypeAndShape": 65,
        "KernelContext_GetInputCount": 88,
        "KernelContext_GetOutputCount": 89,
        "KernelContext_GetInput": 90,
        "KernelContext_GetOutput": 91,
        "ReleaseStatus": 93,
        "ReleaseTensorTypeAndShapeInfo": 99,
        "CreateOpAttr": 211,
        "ReleaseOpAttr": 212,
        "HasSessionConfigEntry": 237,
        "GetSessionConfigEntry": 238,
        "Logger_LogMessage": 247,
        "ReadOpAttr": 272,
        "KernelContext_ParallelFor": 274,
        "GetValueInfoName": 289,
        "GetValueInfoTypeInfo": 290,
        "GetModelEditorApi": 291,
        "HardwareDevice_Type": 307,
        "GetEpApi": 317,
        "GetTensorSizeInBytes": 318,
        "ValueInfo_GetValueProducer": 323,
        "ValueInfo_GetValueNumConsumers": 324,
        "ValueInfo_GetValueConsumers": 325,
        "ValueInfo_GetInitializerValue": 326,
        "ValueInfo_GetExternalInitializerInfo": 327,
        "ValueInfo_IsGraphOutput": 330,
        "ValueInfo_IsConstantInitializer": 331,
        "Graph_GetModelPath": 334,
        "Graph_GetNumOutputs": 340,
        "Graph_GetOutputs": 341,
        "Graph_GetNumNodes": 344,
        "Graph_GetNodes": 345,
        "Graph_GetParentNode": 346,
        "Node_GetId": 348,
        "Node_GetName": 349,
        "Node_GetOperatorType": 350,
        "Node_GetDomain": 351,
        "Node_GetNumInputs": 353,
        "Node_GetInputs": 354,
        "Node_GetNumOutputs": 355,
        "Node_GetOutputs": 356,
        "Node_GetNumImplicitInputs": 357,
        "Node_GetImplicitInputs": 358,
        "Node_GetAttributeByName": 361,
        "ReleaseExternalInitializerInfo": 369,
    },
    "OrtApiBase": {"GetApi": 0, "GetVersionString": 1},
    "OrtNodeComputeInfo": {"CreateState": 1, "Compute": 2, "ReleaseState": 3},
    "OrtEp": {"GetName": 1, "GetCapability": 2, "Compile": 3, "ReleaseNodeComputeInfos": 4},
    "OrtEpFactory": {
        "GetName": 1,
        "GetVendor": 2,
        "GetSupportedDevices": 3,
        "CreateEp": 4,
        "ReleaseEp": 5,
        "GetVendorId": 6,
        "GetVersion": 7,
        "CreateAllocator": 9,
        "ReleaseAllocator": 10,
        "CreateDataTransfer": 11,
        "IsStreamAware": 12,
    },
}
BYTES = {"OrtEp": 104, "OrtEpFactory": 112, "OrtNodeComputeInfo": 32, "OrtNodeFusionOptions": 8}


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
def test_slots_of_the_providers_abi(tmp_path: Path) -> None:
    checks = [
        f'_Static_assert(offsetof({struct}, {member}) == {slot} * sizeof(void *), "{member}");'
        for struct, members in SLOTS.items()
        for member, slot in members.items()
    ]
    checks += [
        f'_Static_assert(sizeof({name}) == {size} / 8 * sizeof(void *), "{name}");' for name, size in BYTES.items()
    ]
    source = tmp_path / "check.c"
    source.write_text('#include "ep_api.h"\n' + "\n".join(checks) + "\n")
    command = ["cc", "-std=c11", f"-I{HEADER.parent}", "-c", str(source), "-o", str(tmp_path / "check.o")]
    subprocess.run(command, check=True)


def test_every_slot_is_pinned() -> None:
    declared = set(re.findall(r"^  [\w\* ]+\(\*(\w+)\)\(", HEADER.read_text(), re.MULTILINE))
    assert declared == {member for members in SLOTS.values() for member in members}
