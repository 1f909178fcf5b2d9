"""The names of classes."""

from driver.gateways.detection.class_names import label_of, labels_of


def test_labels():
    """By line, or by number; a class without a name is called by its number."""
    assert labels_of("dog\ncat\n") == ["dog", "cat"]
    assert labels_of("2 traffic light\n0: dog\n") == ["dog", "", "traffic light"]
    assert [label_of(["dog", ""], n) for n in (0, 1, 2, -1)] == ["dog", "class 1", "class 2", "class -1"]
    assert labels_of("") == []
