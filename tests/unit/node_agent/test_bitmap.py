import pytest

from node_agent.fill.part import Bitmap


def test_a_bitmap_survives_the_way_over_the_disk() -> None:
    bitmap = Bitmap(19)
    bitmap.add([0, 7, 8, 18])

    again = Bitmap.parse(bitmap.to_bytes(), 19)

    assert [index for index in range(19) if index in again] == [0, 7, 8, 18]


@pytest.mark.parametrize(
    "content", [b"", b"x" * 19, Bitmap(20).to_bytes(), Bitmap(19).to_bytes()[:-1], Bitmap(19).to_bytes() + b"\xff"]
)
def test_the_bitmap_of_something_else_is_empty(content: bytes) -> None:
    bitmap = Bitmap.parse(content, 19)

    assert not any(index in bitmap for index in range(19))
