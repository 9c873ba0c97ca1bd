"""Lists in their order, and those of one kind alone."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from streams.openai.objects.bodies import StoreFilePaging
from streams.openai.objects.ordered_ids import OrderedIds
from streams.openai.objects.shapes import page
from streams.openai.objects.stores import Store, kind_of
from tests.streams.openai.objects.test_table import result, store_file

NAMES = st.sampled_from("abcdef")


@given(
    st.lists(st.tuples(NAMES, st.integers(-1, 3), st.sampled_from(["", "x", "y"]))),
    st.none() | NAMES,
    st.none() | NAMES,
    st.booleans(),
    st.sampled_from(["", "x", "y"]),
)
def test_ordered_ids_yield_range_in_order(
    changes: list[tuple[str, int, str]], name: str | None, until: str | None, newer: bool, kind: str
) -> None:
    ordered, entries = OrderedIds(), dict[str, tuple[int, str]]()
    for changed, made_ms, of in changes:
        if made_ms < 0:
            ordered.drop(changed)
            entries.pop(changed, None)
        else:
            ordered.add(changed, made_ms, *([of] if of else []))
            entries[changed] = made_ms, of
    assert len(ordered) == len(entries) and all(entry_id in ordered for entry_id in entries)
    name, until = (entry_id if entry_id in entries else None for entry_id in (name, until))
    listed = sorted(
        entries, key=lambda entry_id: (entries[entry_id][0], entry_id), reverse=not newer
    )
    if until is not None:
        listed = listed[: listed.index(until)]
    if name is not None:
        listed = listed[listed.index(name) + 1 :] if name in listed else []
    expected = [entry_id for entry_id in listed if kind in ("", entries[entry_id][1])]
    assert list(ordered.beyond(name, newer=newer, kind=kind, until=until)) == expected


def test_filtered_page_looks_up_only_its_own_entries() -> None:
    """A filter must not look at each of 40 000 files."""
    store, lookups = Store(), list[str]()
    for number in range(100):
        name, batch_id = f"file-{number:02}", "vsfb_1" if number > 90 else ""
        store.put_file(store_file(name, batch_id=batch_id, created_ms=number))
        store.put_result(result(name, status="completed" if number % 2 else "failed"))

    def found_name(name: str) -> str:
        lookups.append(name)
        return name

    def listed(status: str, batch_id: str, **fields: Any) -> tuple[list[str], bool]:
        lookups.clear()
        listing = page(
            store.order,
            StoreFilePaging(limit=3, order="asc", **fields),
            kind=kind_of(status, batch_id),
            find=found_name,
            shape=lambda name: {"id": name},
        )
        assert len(lookups) <= 4
        return [entry["id"] for entry in listing["data"]], listing["has_more"]

    assert listed("", "") == (["file-00", "file-01", "file-02"], True)
    assert listed("completed", "", after="file-96") == (["file-97", "file-99"], False)
    assert listed("failed", "vsfb_1") == (["file-92", "file-94", "file-96"], True)
    assert listed("failed", "vsfb_1", after="file-95") == (["file-96", "file-98"], False)
    assert listed("", "vsfb_1", before="file-94") == (["file-91", "file-92", "file-93"], False)
    assert listed("cancelled", "") == ([], False)
    store.drop_file("file-92")
    assert listed("failed", "vsfb_1", before="file-94") == ([], False)
