"""All cases of a parametrised test as one test: thousands of short cases cost more to report than to run.

The test names every case that fails. `pytest --apart` makes each case a test again, for instance to run one alone.
"""

import functools
import inspect
import itertools

import pytest

PLACES = tuple(
    f"tests/{place}"
    for place in (
        "burst/test_wire",
        "driver/client/test_pickling",
        "driver/devices",
        "driver/importers",
        "driver/nn",
        "test_docs",
    )
)
OWN = {"caplog", "capfd", "capsys", "monkeypatch", "recwarn", "tmp_path"}  # fixtures that no two cases can share


def is_wanted(path, root):
    """Whether the tests in this file have many short cases that start no process."""
    return path.relative_to(root).as_posix().startswith(PLACES)


def together(function):
    """One function for all cases of a parametrised one, or None where its marks want more than that."""
    marks = list(getattr(function, "pytestmark", ()))
    parametrised = [mark for mark in marks if mark.name == "parametrize"]
    signature = inspect.signature(function)
    if not parametrised or OWN & signature.parameters.keys():
        return None
    if any({"indirect", "scope"} & mark.kwargs.keys() for mark in parametrised):
        return None
    axes = [_axis(*mark.args, **mark.kwargs) for mark in parametrised]
    if any(has_marks for _, has_marks in axes):
        return None
    cases = list(itertools.product(*(axis for axis, _ in axes)))
    given = {name for axis, _ in axes for _, values in axis[:1] for name in values}

    @functools.wraps(function)
    def run(*arguments, **fixtures):
        failed, skipped = [], []
        for case in cases:
            values = {name: value for _, found in case for name, value in found.items()}
            try:
                function(*arguments, **fixtures, **values)
            except pytest.skip.Exception as reason:
                skipped.append(reason)
            except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 (all are raised below)
                error.add_note(f"the case: {'-'.join(text for text, _ in case)}")
                failed.append(error)
        if failed:
            raise BaseExceptionGroup(f"{len(failed)} of {len(cases)} cases", failed)
        if len(skipped) == len(cases):
            raise skipped[0] if skipped else pytest.skip.Exception("no cases")

    rest = [parameter for name, parameter in signature.parameters.items() if name not in given]
    run.__signature__ = signature.replace(parameters=rest)
    run.pytestmark = [mark for mark in marks if mark.name != "parametrize"]
    return run


def _axis(names, found, ids=None):
    """Of one mark: its cases, each a text and values by name; and whether any of them has marks of its own."""
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    axis, has_marks = [], False
    texts = ids if ids is not None and not callable(ids) else itertools.repeat(None)
    for value, text in zip(list(found), texts, strict=False):
        values, marks, own_text = ((value,) if len(names) == 1 else value), (), None
        if isinstance(value, type(pytest.param())):
            values, marks, own_text = value
        has_marks |= bool(marks)
        described = ", ".join(f"{ids(v) if callable(ids) else v!r}"[:80] for v in values)
        axis.append((str(own_text or text or described), dict(zip(names, values, strict=True))))
    return axis, has_marks
