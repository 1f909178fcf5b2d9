"""The tests of Android's suite, by name, and those of the kit that stand for them."""

from fnmatch import fnmatchcase

import pytest

from driver.vts import ALL, Case, catalogue
from driver.vts.families import FAMILIES
from driver.vts.qos import endless
from driver.vts.samples import generated

CACHING = ("SaveToCache", "PrepareModelFromCache")
IN_AOSP = {
    "NeuralnetworksHidlTest": {
        *("CreateDevice", "StatusTest", "GetCapabilitiesTest", "GetDeviceVersionStringTest", "GetDeviceTypeTest"),
        *("GetDeviceNameTest", "GetDeviceSupportedExtensionsTest", "getNumberOfCacheFilesNeeded", "CycleTest"),
    },
    "CompilationCachingTest": {
        *("CacheSavingAndRetrieval", "CacheSavingAndRetrievalNonZeroOffset", "ReplaceSecuritySensitiveCache"),
        *(f"{begin}Invalid{what}" for begin in CACHING for what in ("NumCache", "NumFd", "AccessMode")),
        *("SaveToCache_TOCTOU", "PrepareFromCache_TOCTOU"),
    },
    "CompilationCachingSecurityTest": {
        *("CorruptedModelCache", "WrongLengthModelCache", "CorruptedDataCache", "WrongLengthDataCache", "WrongToken"),
    },
    "MemoryDomainAllocateTest": {
        *("EmptyRole", "NullptrPreparedModel", "InvalidPreparedModel", "InvalidModelIndex", "InvalidIOIndex"),
        *("InvalidFrequency", "SameRoleSpecifiedTwice", "ConflictOperandType", "ConflictScale", "ConflictZeroPoint"),
        *("ConflictRankBetweenRoles", "ConflictDimensionsBetweenRoles", "ConflictRankBetweenRoleAndDesc"),
        *("ConflictDimensionsBetweenRoleAndDesc", "ConflictRankWithScalarRole"),
    },
    "MemoryDomainCopyTest": {
        *("CopyFrom_InvalidMemorySize", "CopyFrom_InvalidMemorySize_DynamicShape", "CopyFrom_InvalidDimensions"),
        *("CopyFrom_InvalidDimensions_DynamicShape", "CopyTo_UninitializedMemory", "CopyTo_InvalidMemorySize"),
        "CopyTo_InvalidMemorySize_DynamicShape",
    },
    "MemoryDomainExecutionTest": {
        *("InvalidToken", "InvalidPreparedModel", "InvalidIOIndex", "InvalidIOType", "UninitializedMemory"),
        *("SameRequestMultipleRoles", "InvalidDimensions"),
    },
    **{
        test: {""}
        for test in (
            *("GeneratedTest", "DynamicOutputShapeTest", "MemoryDomainTest", "FencedComputeTest"),
            *("QuantizationCouplingTest", "InfiniteLoopTimeoutTest", "DeadlineTest"),
            *(f"ValidationTest ({part})" for part in ("ValidateModel", "ValidateRequest", "ValidateBurst")),
        )
    },
}
"""TEST_P of neuralnetworks/1.2/vts/functional and neuralnetworks/1.3/vts/functional, as of 2024."""


@pytest.fixture(scope="module")
def everything():
    """All tests of the kit, with each of its families."""
    return {test.name: test.family for test in catalogue(scope=ALL)}


def named(families):
    """The tests of AOSP that families name, by suite."""
    found = {}
    for family in filter(None, families):
        suite, _, tests = family.partition(".")
        found.setdefault(suite, set()).update(tests.split(", "))
    return found


def test_every_test_of_androids_suite_has_one_of_the_kit(everything):
    """And the kit names none that there is not."""
    assert named(everything.values()) == IN_AOSP


def test_every_pattern_is_that_of_a_test(everything):
    """None is left of what was renamed, and none stands behind a wider one."""
    used = {next((pattern for pattern in FAMILIES if fnmatchcase(name, pattern)), None) for name in everything}
    assert [pattern for pattern in FAMILIES if pattern not in used] == []


def test_what_no_suite_has_is_the_kits_own(everything):
    """Random graphs, images and layouts are."""
    for name in ("operations/random_graph/add", "memory/hardware_buffer/nv12/padded", "memory/layout/7"):
        assert everything[name] == ""


def test_each_case_runs_on_every_path_of_the_suite():
    """GeneratedTest, DynamicOutputShapeTest, FencedComputeTest, MemoryDomainTest in two kinds, DeadlineTest; a signed
    twin where there is one, and nothing but itself for a case that must fail.
    """
    quantised = next(case for case in generated() if case.signed() is not None)
    case = Case("mine", quantised.model, quantised.feeds, quantised.expected)
    names = [test.name for test in catalogue([case, endless()]) if test.name.startswith("operations/mine")]
    ways = ("", "/burst", "/dynamic", "/signed", "/async", "/fenced", "/blobs", "/buffers", "/deadlines")
    assert names == [f"operations/mine{way}" for way in ways]
    assert [t.name for t in catalogue([endless()]) if "/endless" in t.name] == [
        "operations/endless",
        "qos/endless_loop",
    ]
