"""Orders to load a model, from a command to the launcher."""

from pathlib import Path

from infra.stack.models.orders import FOLDER, LoadModel, take_orders, write_order


def test_order_is_taken_once(tmp_path: Path) -> None:
    assert list(take_orders(tmp_path)) == []
    order = LoadModel(worker="replica-0", model="a")
    write_order(tmp_path, order)
    later_order = LoadModel(worker="replica-0", model="org/ü")
    write_order(tmp_path, later_order)
    write_order(tmp_path, LoadModel(worker="decode-1", model="a"))
    assert list(take_orders(tmp_path)) == [LoadModel(worker="decode-1", model="a"), later_order]
    assert list(take_orders(tmp_path)) == []
    assert (tmp_path / FOLDER).stat().st_mode & 0o777 == 0o700


def test_files_that_are_no_orders_are_skipped_and_deleted(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    for number, text in enumerate(("", "[]", "{}", "\udcff", '{"worker": "a", "model": "b"}')):
        file = tmp_path / FOLDER / f"{number}.json"
        file.write_text(text, errors="surrogateescape")
    assert list(take_orders(tmp_path)) == [LoadModel(worker="a", model="b")]
    assert not [*(tmp_path / FOLDER).iterdir()]
