"""The tests of Android's suite (VTS, HAL 1.2 and 1.3) for which those of this kit stand.

The names are those in AOSP, in hardware/interfaces/neuralnetworks/*/vts/functional. `ValidationTest` is one test there;
the file in which its part lies stands behind it. A test without a family is this kit's own.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

_BASIC, _VALIDATION = "NeuralnetworksHidlTest", "ValidationTest"
_CACHING, _SECURITY = "CompilationCachingTest", "CompilationCachingSecurityTest"
_ALLOCATE, _COPY, _EXECUTION = "MemoryDomainAllocateTest", "MemoryDomainCopyTest", "MemoryDomainExecutionTest"
_OPEN = "DynamicShape"

FAMILIES: dict[str, str] = {
    "device/status": f"{_BASIC}.CreateDevice",
    "device/state": f"{_BASIC}.StatusTest",
    "device/capabilities/*": f"{_BASIC}.GetCapabilitiesTest",
    "device/version": f"{_BASIC}.GetDeviceVersionStringTest",
    "device/type": f"{_BASIC}.GetDeviceTypeTest",
    "device/name": f"{_BASIC}.GetDeviceNameTest",
    "extension/names": f"{_BASIC}.GetDeviceSupportedExtensionsTest",
    "caching/number_of_files": f"{_BASIC}.getNumberOfCacheFilesNeeded",
    "model/cycle/*": f"{_BASIC}.CycleTest",
    "model/*/valid": "",
    "model/*": f"{_VALIDATION} (ValidateModel)",
    "qos/preference/*": f"{_VALIDATION} (ValidateModel)",
    "qos/priority/low": "DeadlineTest",
    "qos/priority/medium": "DeadlineTest",
    "qos/priority/high": "DeadlineTest",
    "qos/priority/*": f"{_VALIDATION} (ValidateModel)",
    "request/*/valid": "",
    "request/*": f"{_VALIDATION} (ValidateRequest)",
    "qos/fenced/null_fence": f"{_VALIDATION} (ValidateRequest)",
    "qos/fenced/*/remove-*": f"{_VALIDATION} (ValidateRequest)",
    "burst/malformed/*": f"{_VALIDATION} (ValidateBurst)",
    "burst/short_queue/*": f"{_VALIDATION} (ValidateBurst)",
    "burst/zeroed/*": f"{_VALIDATION} (ValidateBurst)",
    "burst/free_memory": f"{_VALIDATION} (ValidateRequest)",
    "operations/random_graph/*": "",
    "operations/*/dynamic": "DynamicOutputShapeTest",
    "operations/*/signed": "QuantizationCouplingTest",
    "operations/*/fenced": "FencedComputeTest",
    "operations/*/blobs": "MemoryDomainTest",
    "operations/*/buffers": "MemoryDomainTest",
    "operations/*/deadlines": "DeadlineTest",
    "operations/*": "GeneratedTest",
    "qos/endless_loop": "InfiniteLoopTimeoutTest",
    "qos/deadline/*": "DeadlineTest",
    "memory/allocate/no_*": f"{_ALLOCATE}.EmptyRole",
    "memory/allocate/null_model/*": f"{_ALLOCATE}.NullptrPreparedModel",
    "memory/allocate/dead_model/*": f"{_ALLOCATE}.InvalidPreparedModel",
    "memory/allocate/foreign_model": f"{_ALLOCATE}.InvalidPreparedModel",
    "memory/allocate/model_index": f"{_ALLOCATE}.InvalidModelIndex",
    "memory/allocate/*put_index": f"{_ALLOCATE}.InvalidIOIndex",
    "memory/allocate/frequency_*": f"{_ALLOCATE}.InvalidFrequency",
    "memory/allocate/*_twice": f"{_ALLOCATE}.SameRoleSpecifiedTwice",
    "memory/allocate/type_of_*": f"{_ALLOCATE}.ConflictOperandType",
    "memory/allocate/scale_of_*": f"{_ALLOCATE}.ConflictScale",
    "memory/allocate/zero_point_of_*": f"{_ALLOCATE}.ConflictZeroPoint",
    "memory/allocate/rank_of_*": f"{_ALLOCATE}.ConflictRankBetweenRoles",
    "memory/allocate/dimensions_of_*": f"{_ALLOCATE}.ConflictDimensionsBetweenRoles",
    "memory/allocate/desc_rank": f"{_ALLOCATE}.ConflictRankBetweenRoleAndDesc",
    "memory/allocate/desc_dimensions": f"{_ALLOCATE}.ConflictDimensionsBetweenRoleAndDesc",
    "memory/allocate/desc_of_scalar": f"{_ALLOCATE}.ConflictRankWithScalarRole",
    "memory/copy/wrong_size": f"{_COPY}.CopyFrom_InvalidMemorySize, CopyTo_InvalidMemorySize",
    "memory/copy/wrong_size_open": f"{_COPY}.CopyFrom_InvalidMemorySize_{_OPEN}, CopyTo_InvalidMemorySize_{_OPEN}",
    "memory/copy/wrong_dimensions": f"{_COPY}.CopyFrom_InvalidDimensions",
    "memory/copy/open_dimensions": f"{_COPY}.CopyFrom_InvalidDimensions_{_OPEN}",
    "memory/copy/no_value": f"{_COPY}.CopyTo_UninitializedMemory",
    "memory/buffers/unknown_token/*": f"{_EXECUTION}.InvalidToken",
    "memory/buffers/undeclared_role/*": f"{_EXECUTION}.InvalidPreparedModel, InvalidIOIndex, InvalidIOType",
    "memory/buffers/fresh_input/*": f"{_EXECUTION}.UninitializedMemory",
    "memory/buffers/used_twice/*": f"{_EXECUTION}.SameRequestMultipleRoles",
    "memory/buffers/places_in_it/*": f"{_EXECUTION}.InvalidDimensions",
    "memory/buffers/shape_conflict/*": f"{_EXECUTION}.InvalidDimensions",
    "caching/save_and_restore/*": f"{_CACHING}.CacheSavingAndRetrieval",
    "caching/offset": f"{_CACHING}.CacheSavingAndRetrievalNonZeroOffset",
    "caching/counts/none": f"{_CACHING}.SaveToCacheInvalidNumFd, PrepareModelFromCacheInvalidNumFd",
    "caching/counts/*": f"{_CACHING}.SaveToCacheInvalidNumCache, PrepareModelFromCacheInvalidNumCache",
    "caching/descriptor/*": f"{_CACHING}.SaveToCacheInvalidAccessMode, PrepareModelFromCacheInvalidAccessMode",
    "caching/changed_while_saved/*": f"{_CACHING}.SaveToCache_TOCTOU",
    "caching/changed_meanwhile/*": f"{_CACHING}.PrepareFromCache_TOCTOU",
    "caching/mixed": f"{_CACHING}.ReplaceSecuritySensitiveCache",
    "caching/bit_flipped/*": f"{_SECURITY}.CorruptedModelCache, CorruptedDataCache",
    "caching/corrupted/*": f"{_SECURITY}.CorruptedModelCache, CorruptedDataCache",
    "caching/extended/*": f"{_SECURITY}.WrongLengthModelCache, WrongLengthDataCache",
    "caching/truncated/*": f"{_SECURITY}.WrongLengthModelCache, WrongLengthDataCache",
    "caching/token/unknown": f"{_SECURITY}.WrongToken",
}
"""By pattern of names, the first that matches: the test in AOSP."""


def family_of(name: str) -> str:
    """Return the test of Android's suite that a test of this kit stands for; "" if that has none."""
    return next((family for pattern, family in FAMILIES.items() if fnmatchcase(name, pattern)), "")
