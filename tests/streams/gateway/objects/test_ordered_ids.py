"""Lists in their order, and those of one kind alone."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from streams.gateway.objects.bodies import StoreFilePaging
from streams.gateway.objects.ordered_ids import OrderedIds
from streams.gateway.objects.shapes import page
from streams.gateway.objects.stores import Store, kind_of
from tests.streams.gateway.objects.test_table import result, wanted

NAMES = st.sampled_from("abcdef")


@given(
    st.lists(st.tuples(NAMES, st.integers(-1, 3), st.sampled_from(["", "x", "y"]))),
    st.none() | NAMES,
    st.none() | NAMES,
    st.booleans(),
    st.sampled_from(["", "x", "y"]),
)
def test_what_lies_between_two_names(
    changes: list[tuple[str, int, str]], name: str | None, until: str | None, newer: bool, kind: str
) -> None:
    ordered, kept = OrderedIds(), dict[str, tuple[int, str]]()
    for changed, made_ms, of in changes:
        if made_ms < 0:
            ordered.drop(changed)
            kept.pop(changed, None)
        else:
            ordered.add(changed, made_ms, *([of] if of else []))
            kept[changed] = made_ms, of
    assert len(ordered) == len(kept) and all(each in ordered for each in kept)
    name, until = (each if each in kept else None for each in (name, until))
    listed = sorted(kept, key=lambda each: (kept[each][0], each), reverse=not newer)
    if until is not None:
        listed = listed[: listed.index(until)]
    if name is not None:
        listed = listed[listed.index(name) + 1 :] if name in listed else []
    expected = [each for each in listed if kind in ("", kept[each][1])]
    assert list(ordered.beyond(name, newer=newer, kind=kind, until=until)) == expected


def test_a_list_with_a_filter_looks_at_no_more_than_a_page() -> None:
    """It looked at each of 40 000 files (review of 28)."""
    store, seen = Store(), list[str]()
    for number in range(100):
        name, batch_id = f"file-{number:02}", "vsfb_1" if number > 90 else ""
        store.put_file(wanted(name, batch_id=batch_id, created_ms=number))
        store.put_result(result(name, status="completed" if number % 2 else "failed"))

    def found_name(name: str) -> str:
        seen.append(name)
        return name

    def listed(status: str, batch_id: str, **more: Any) -> tuple[list[str], bool]:
        seen.clear()
        found = page(
            store.order,
            StoreFilePaging(limit=3, order="asc", **more),
            kind=kind_of(status, batch_id),
            find=found_name,
            shape=lambda name: {"id": name},
        )
        assert len(seen) <= 4
        return [each["id"] for each in found["data"]], found["has_more"]

    assert listed("", "") == (["file-00", "file-01", "file-02"], True)
    assert listed("completed", "", after="file-96") == (["file-97", "file-99"], False)
    assert listed("failed", "vsfb_1") == (["file-92", "file-94", "file-96"], True)
    assert listed("failed", "vsfb_1", after="file-95") == (["file-96", "file-98"], False)
    assert listed("", "vsfb_1", before="file-94") == (["file-91", "file-92", "file-93"], False)
    assert listed("cancelled", "") == ([], False)
    store.drop_file("file-92")
    assert listed("failed", "vsfb_1", before="file-94") == ([], False)
