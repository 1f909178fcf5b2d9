"""The door in C++, built once, and a server of the same models behind each of both doors."""

import native_doors
import pytest


@pytest.fixture(scope="session")
def program():
    return native_doors.built()


@pytest.fixture(scope="session")
def sanitized():
    return native_doors.built("SANITIZE=1")


@pytest.fixture(scope="package")
def pair(program):
    with native_doors.unix_and_python(program) as found:
        yield found
