"""Our view of onnxruntime's C ABI: each function and member where API 23 has it, and where the official headers have it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import onnxruntime_headers
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
        "CreateCustomOpDomain": 26,
        "CustomOpDomain_Add": 27,
        "AddCustomOpDomain": 28,
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
        "ReleaseCustomOpDomain": 101,
        "CreateOpAttr": 211,
        "ReleaseOpAttr": 212,
        "HasSessionConfigEntry": 237,
        "GetSessionConfigEntry": 238,
        "KernelInfo_GetNodeName": 244,
        "Logger_LogMessage": 247,
        "KernelInfoGetConstantInput_tensor": 249,
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
    "OrtCustomOp": {
        "CreateKernel": 1,
        "GetName": 2,
        "GetExecutionProviderType": 3,
        "GetInputType": 4,
        "GetInputTypeCount": 5,
        "GetOutputType": 6,
        "GetOutputTypeCount": 7,
        "KernelCompute": 8,
        "KernelDestroy": 9,
        "GetInputCharacteristic": 10,
        "GetOutputCharacteristic": 11,
        "GetInputMemoryType": 12,
        "GetVariadicInputMinArity": 13,
        "GetVariadicInputHomogeneity": 14,
        "GetVariadicOutputMinArity": 15,
        "GetVariadicOutputHomogeneity": 16,
        "CreateKernelV2": 17,
        "KernelComputeV2": 18,
        "InferOutputShapeFn": 19,
        "GetStartVersion": 20,
        "GetEndVersion": 21,
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
# OrtCustomOp is the one of API 18; later ones have more behind it.
BYTES = {"OrtCustomOp": 208, "OrtEp": 104, "OrtEpFactory": 112, "OrtNodeComputeInfo": 32, "OrtNodeFusionOptions": 8}


CONSTANTS = {
    "ORT_FAIL": "ORT_FAIL",
    "ORT_INVALID_ARGUMENT": "ORT_INVALID_ARGUMENT",
    "ORT_NO_SUCHFILE": "ORT_NO_SUCHFILE",
    "ORT_INVALID_GRAPH": "ORT_INVALID_GRAPH",
    "ORT_EP_FAIL": "ORT_EP_FAIL",
    "ORT_LOG_VERBOSE": "ORT_LOGGING_LEVEL_VERBOSE",
    "ORT_LOG_ERROR": "ORT_LOGGING_LEVEL_ERROR",
    "ORT_DEVICE_CPU": "OrtHardwareDeviceType_CPU",
    "ORT_ATTRIBUTE_INT": "ORT_OP_ATTR_INT",
    "ORT_ATTRIBUTE_STRING": "ORT_OP_ATTR_STRING",
    "ORT_TYPE_UNDEFINED": "ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED",
    "ORT_MEMORY_DEFAULT": "OrtMemTypeDefault",
    "ORT_VARIADIC": "INPUT_OUTPUT_VARIADIC",
    "ORT_ARENA_ALLOCATOR": "OrtArenaAllocator",
    "ORT_REQUIRED": "INPUT_OUTPUT_REQUIRED",
}
"""By our name, the official one."""
# Of each of our headers, the structures in which it declares functions.
HEADERS = {
    HEADER: (
        "OrtEpApi",
        "OrtModelEditorApi",
        "OrtApi",
        "OrtApiBase",
        "OrtNodeComputeInfo",
        "OrtEp",
        "OrtEpFactory",
        "OrtCustomOp",
    ),
    NATIVE / "ort_api.h": ("OrtApi", "OrtApiBase", "OrtCustomOp", "OrtAllocator"),
}
_MEMBER = re.compile(r"^  [\w\* ]+\(\*(\w+)\)\(", re.MULTILINE)


def members(header: Path, struct: str) -> list[str]:
    """The functions that a structure of ``header`` declares."""
    text = header.read_text()
    found = re.search(
        rf"^typedef struct(?: {struct})? \{{$(?P<old>(?:(?!^\}})[\s\S])*?)^\}} {struct};", text, re.MULTILINE
    )
    found = found or re.search(rf"^struct {struct} \{{$(?P<old>[\s\S]*?)^\}};", text, re.MULTILINE)
    assert found, struct
    return _MEMBER.findall(found["old"])


def compile_checks(tmp_path: Path, checks: list[str], include: Path, name: str) -> None:
    source = tmp_path / "check.c"
    source.write_text(f'#include "{name}"\n' + "\n".join(checks) + "\n")
    command = ["cc", "-std=c11", f"-I{include}", "-c", str(source), "-o", str(tmp_path / "check.o")]
    subprocess.run(command, check=True)


def printed(tmp_path: Path, wanted: dict[str, str], include: Path, names: list[str]) -> dict[str, int]:
    """The values of C expressions, by key, where ``names`` of ``include`` are included."""
    lines = "".join(f'printf("{key} %lld\\n", (long long)({value}));\n' for key, value in wanted.items())
    includes = "".join(f'#include "{name}"\n' for name in names)
    source = tmp_path / "print.c"
    source.write_text(f"#include <stdio.h>\n#include <stddef.h>\n{includes}int main(void) {{\n{lines}return 0; }}\n")
    command = ["cc", "-std=c11", "-w", f"-I{include}", str(source), "-o", str(tmp_path / "print")]
    subprocess.run(command, check=True)
    out = subprocess.run([tmp_path / "print"], capture_output=True, text=True, check=True).stdout
    return {key: int(value) for key, value in (line.split() for line in out.splitlines())}


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
@pytest.mark.parametrize("header", HEADERS, ids=lambda path: path.name)
def test_against_the_official_headers(tmp_path: Path, header: Path) -> None:
    """Every function that a header of ours declares, at the offset that the official one has it at; constants too."""
    official = onnxruntime_headers.find()
    if isinstance(official, str):
        pytest.skip(official)
    wanted = {
        f"{struct}.{member}": f"offsetof({struct}, {member})"
        for struct in HEADERS[header]
        for member in members(header, struct)
    }
    assert len(wanted) > 40
    theirs = printed(tmp_path, wanted, official, ["onnxruntime_c_api.h"])
    assert printed(tmp_path, wanted, header.parent, [header.name]) == theirs
    declared = {ours: theirs for ours, theirs in CONSTANTS.items() if re.search(rf"\b{ours}\b", header.read_text())}
    assert printed(tmp_path, {o: o for o in declared}, header.parent, [header.name]) == printed(
        tmp_path, declared, official, ["onnxruntime_c_api.h"]
    )


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
    compile_checks(tmp_path, checks, HEADER.parent, "ep_api.h")


def test_every_slot_is_pinned() -> None:
    declared = set(re.findall(r"^  [\w\* ]+\(\*(\w+)\)\(", HEADER.read_text(), re.MULTILINE))
    assert declared == {member for members in SLOTS.values() for member in members}
