"""The laws of DataProto: values in, values out, and what crosses a process border."""

from __future__ import annotations

import gc
import json
import pickle
import tempfile
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_lite.protocol import DataProto, DataProtoItem


def four_rows() -> DataProto:
    return DataProto.from_dict(
        {
            "ids": torch.arange(12).view(4, 3),
            "bf16": torch.tensor([0.5, -1.0, float("nan"), 3.0]).bfloat16(),
            "flag": torch.tensor([True, False, True, False]),
            "none_wide": torch.zeros(4, 0),
        },
        {"uid": ["a", "a", "b", "b"], "ragged": [[1, 2], [3], None, {"x": [1.5, None]}]},
        {"temperature": 1.0},
    )


def objects_only(rows: int) -> DataProto:
    return DataProto(None, {"uid": [str(row) for row in range(rows)]})


def copy_of(batch: DataProto) -> DataProto:
    return pickle.loads(pickle.dumps(batch))


ROW_COUNTS = st.integers(0, 9)


@st.composite
def batches(draw: Any) -> DataProto:
    rows = draw(ROW_COUNTS)
    width = draw(st.integers(0, 3))
    numbers = draw(st.lists(st.integers(-5, 5), min_size=rows * width, max_size=rows * width))
    dtype = draw(st.sampled_from([torch.int64, torch.float32, torch.bfloat16, torch.bool, torch.uint8]))
    elements = st.none() | st.text(max_size=3) | st.lists(st.integers(0, 9), max_size=3)
    tensors = {} if draw(st.booleans()) else {"t": torch.tensor(numbers).view(rows, width).to(dtype)}
    objects = {} if draw(st.booleans()) else {"o": draw(st.lists(elements, min_size=rows, max_size=rows))}
    return DataProto.from_dict(tensors, objects, {"fact": draw(st.floats(allow_nan=True))})


# --- construction ---------------------------------------------------------------------------------------------------


def test_object_columns_of_equal_lists_stay_one_dimensional() -> None:
    batch = DataProto.from_dict(non_tensors={"k": [[1, 2], [3, 4]]})
    column = batch.non_tensor_batch["k"]
    assert column.shape == (2,) and column.dtype == object and column.tolist() == [[1, 2], [3, 4]]
    assert isinstance(column[0], list)
    joined = DataProto.concat([batch, DataProto.from_dict(non_tensors={"k": [[5]]})])
    assert joined.non_tensor_batch["k"].tolist() == [[1, 2], [3, 4], [5]]
    assert batch.repeat(2).non_tensor_batch["k"].tolist() == [[1, 2], [1, 2], [3, 4], [3, 4]]
    assert batch[[1]].non_tensor_batch["k"].shape == (1,)


@pytest.mark.parametrize("values", [[{"a": 1}, {"a": 2}], ["x", "yy"], np.array(["x", "yy"]), np.array([1.5, 2.5])])
def test_object_columns_hold_plain_elements_whatever_they_were_given_as(values: Any) -> None:
    column = DataProto.from_dict(non_tensors={"k": values}).non_tensor_batch["k"]
    assert column.shape == (2,) and column.dtype == object and column.tolist() == list(values)


def test_a_two_dimensional_array_becomes_one_array_per_row() -> None:
    column = DataProto.from_dict(non_tensors={"k": np.array([[1, 2], [3, 4]])}).non_tensor_batch["k"]
    assert column.shape == (2,) and column[1].tolist() == [3, 4]


def test_columns_of_unequal_length_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="a 2, b 3"):
        DataProto.from_dict({"a": torch.zeros(2), "b": torch.zeros(3)})
    with pytest.raises(ValueError, match="'uid' has 1 rows; the other columns have 2"):
        DataProto.from_dict({"a": torch.zeros(2)}, {"uid": ["x"]})


def test_a_column_of_the_wrong_kind_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="'a' is list.*non_tensors="):
        DataProto.from_dict({"a": [1, 2]})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="'a' is a tensor without rows"):
        DataProto.from_dict({"a": torch.tensor(1.0)})
    with pytest.raises(TypeError, match="'uid' is a str"):
        DataProto.from_dict(non_tensors={"uid": "ab"})
    with pytest.raises(ValueError, match=r"\['a'\] are given both as tensors and as objects"):
        DataProto.from_dict({"a": torch.zeros(2)}, {"a": [1, 2]})


def test_batches_differ_by_any_value_dtype_column_or_fact() -> None:
    batch = four_rows()
    assert batch == four_rows()
    assert batch != batch[:3] and batch != batch.select(["ids"]) and batch != DataProto(meta_info=batch.meta_info)
    assert batch != DataProto(batch.batch, batch.non_tensor_batch, {"temperature": 0.5})
    ones = torch.ones(2)
    assert DataProto.from_dict({"a": ones}) != DataProto.from_dict({"a": ones.long()})
    assert DataProto.from_dict(non_tensors={"a": [[1], 2]}) != DataProto.from_dict(non_tensors={"a": [[1], 3]})


# --- choosing rows --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "index, rows",
    [
        ([True, False, True, False], [0, 2]),
        (np.array([0, 2]), [0, 2]),
        (torch.tensor([False, True, False, True]), [1, 3]),
        (torch.tensor([3, -4]), [3, 0]),
        (slice(1, 3), [1, 2]),
        (slice(None, None, 2), [0, 2]),
        (slice(None, None, -1), [3, 2, 1, 0]),
        ([], []),
        ([3, 1], [3, 1]),
    ],
)
def test_rows_are_chosen_by_slice_list_mask_array_or_tensor(index: Any, rows: list[int]) -> None:
    for batch in (four_rows(), four_rows().select(batch_keys=[]), four_rows().select(non_tensor_batch_keys=[])):
        chosen = batch[index]
        assert isinstance(chosen, DataProto) and len(chosen) == len(rows) and type(len(chosen)) is int
        assert chosen.batch.batch_size == (len(rows),)
        for key, value in batch.batch.items():
            torch.testing.assert_close(chosen.batch[key], value[rows], rtol=0, atol=0, equal_nan=True)
        for key, column in batch.non_tensor_batch.items():
            assert chosen.non_tensor_batch[key].tolist() == [column[row] for row in rows]
        assert [len(piece) for piece in chosen.chunk(2)] == [(len(rows) + 1) // 2, len(rows) // 2]


@pytest.mark.parametrize("row", [-1, 3, np.int64(3)])
def test_an_int_gives_one_row(row: int) -> None:
    item = four_rows()[row]
    assert isinstance(item, DataProtoItem)
    assert item.batch["ids"].tolist() == [9, 10, 11] and item.non_tensor_batch["uid"] == "b"
    assert item.meta_info == {"temperature": 1.0}


def test_iterating_gives_every_row_once() -> None:
    assert [item.non_tensor_batch["uid"] for item in four_rows()] == ["a", "a", "b", "b"]


@pytest.mark.parametrize("index", [4, -5, [0, 4], [-5], [True, False], np.array([True] * 5)])
def test_rows_that_do_not_exist_are_an_index_error(index: Any) -> None:
    for batch in (four_rows(), four_rows().select([], [])):
        with pytest.raises(IndexError):
            batch[index]


@pytest.mark.parametrize("index", [[0.5], torch.tensor([[0]]), ["a"]])
def test_an_index_that_is_no_row_number_is_a_type_error(index: Any) -> None:
    with pytest.raises(TypeError, match="rows are chosen by"):
        four_rows()[index]


# --- cutting and joining --------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(batches(), st.integers(1, 11), st.integers(1, 11))
def test_concat_undoes_every_split_and_chunk(batch: DataProto, size: int, pieces: int) -> None:
    by_size, by_number = batch.split(size), batch.chunk(pieces)
    assert DataProto.concat(by_size) == batch and DataProto.concat(by_number) == batch
    assert all(len(piece) == size for piece in by_size[:-1]) and len(by_size[-1]) <= size
    assert len(by_number) == pieces and max(map(len, by_number)) - min(map(len, by_number)) <= 1


@settings(deadline=None, max_examples=60)
@given(batches())
def test_pickling_and_saving_give_back_an_equal_batch(batch: DataProto) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(batch, protocol=protocol)) == batch
    with tempfile.TemporaryDirectory() as folder:
        batch.save_to_disk(folder)
        assert DataProto.load_from_disk(folder) == batch


def test_split_takes_a_list_of_sizes_that_may_be_zero() -> None:
    pieces = four_rows().split([1, 0, 3])
    assert [piece.batch["ids"][:, 0].tolist() for piece in pieces] == [[0], [], [3, 6, 9]]
    assert DataProto.concat(pieces) == four_rows()
    assert four_rows()[[]].split([]) == []


@pytest.mark.parametrize("size", [0, -1, [1, 2], [5, -1], []])
def test_split_refuses_sizes_that_do_not_fit(size: Any) -> None:
    with pytest.raises(ValueError, match="split"):
        four_rows().split(size)


def test_chunk_puts_the_longer_pieces_first() -> None:
    assert [len(piece) for piece in four_rows().chunk(3)] == [2, 1, 1]
    assert [len(piece) for piece in four_rows().chunk(6)] == [1, 1, 1, 1, 0, 0]
    with pytest.raises(ValueError, match=r"chunk\(0\)"):
        four_rows().chunk(0)


def test_slices_split_chunk_and_select_are_views() -> None:
    batch = four_rows()
    start = batch.batch["ids"].data_ptr()
    row_bytes = 3 * 8
    assert batch[1:3].batch["ids"].data_ptr() == start + row_bytes
    assert batch.split(2)[1].batch["ids"].data_ptr() == start + 2 * row_bytes
    assert batch.chunk(4)[3].batch["ids"].data_ptr() == start + 3 * row_bytes
    assert batch.select(["ids"]).batch["ids"].data_ptr() == start
    assert np.shares_memory(batch[1:3].non_tensor_batch["uid"], batch.non_tensor_batch["uid"])


def test_concat_names_the_columns_that_differ() -> None:
    batch = DataProto.from_dict({"a": torch.zeros(1), "b": torch.zeros(1)}, {"uid": ["x"]})
    with pytest.raises(ValueError, match=r"piece 1 .*missing \['b', 'uid'\], additional \['c'\]"):
        DataProto.concat([batch, DataProto.from_dict({"a": torch.zeros(1), "c": torch.zeros(1)})])
    with pytest.raises(ValueError, match="no pieces"):
        DataProto.concat([])


def test_concat_names_the_column_whose_width_or_dtype_differs() -> None:
    narrow = DataProto.from_dict({"responses": torch.zeros(2, 3)})
    with pytest.raises(ValueError, match=r"'responses' is \[2, 3\].*\[1, 5\]"):
        DataProto.concat([narrow, DataProto.from_dict({"responses": torch.zeros(1, 5)})])
    with pytest.raises(ValueError, match="'responses' is .*float32 in piece 0 but .*int64 in piece 1"):
        DataProto.concat([narrow, DataProto.from_dict({"responses": torch.zeros(1, 3, dtype=torch.int64)})])


def test_concat_keeps_the_facts_of_all_pieces() -> None:
    facts = [
        {"metrics": {"loss": 1}, "timing_s": 12.50031, "same": "x"},
        {"metrics": {"loss": 3}, "timing_s": 12.50032, "same": "x", "k": 7},
    ]
    pieces = [DataProto(None, {"uid": ["a"]}, fact) for fact in facts]
    merged = DataProto.concat(pieces).meta_info
    assert merged == {"metrics": {"loss": [1, 3]}, "timing_s": [12.50031, 12.50032], "same": "x", "k": 7}
    assert np.mean(merged["metrics"]["loss"]) == 2


# --- columns --------------------------------------------------------------------------------------------------------


def test_union_adds_columns_and_takes_equal_ones_once() -> None:
    batch = DataProto.from_dict({"a": torch.tensor([1.0, float("nan")])}, {"uid": ["x", "y"]}, {"t": 1})
    more = DataProto.from_dict({"a": torch.tensor([1.0, float("nan")]), "b": torch.zeros(2)}, {"uid": ["x", "y"]})
    assert list(batch.union(more).batch.keys()) == ["a", "b"]
    assert batch.union(DataProto(meta_info={"u": 2})).meta_info == {"t": 1, "u": 2}
    assert DataProto().union(batch) == batch and len(DataProto().union(DataProto())) == 0


@pytest.mark.parametrize(
    "other, name",
    [
        (DataProto.from_dict({"a": torch.tensor([1, 3])}), "tensor column 'a'"),
        (DataProto.from_dict({"a": torch.tensor([1.0, 2.0])}), "tensor column 'a'"),
        (DataProto.from_dict(non_tensors={"uid": ["x", "z"]}), "object column 'uid'"),
        (DataProto(meta_info={"t": 2}), "meta_info key 't'"),
    ],
)
def test_union_of_a_key_with_other_values_is_an_error_naming_it(other: DataProto, name: str) -> None:
    batch = DataProto.from_dict({"a": torch.tensor([1, 2])}, {"uid": ["x", "y"]}, {"t": 1})
    with pytest.raises(ValueError, match=name):
        batch.union(other)


def test_union_of_different_row_counts_is_an_error() -> None:
    with pytest.raises(ValueError, match="4 rows with 2 rows"):
        four_rows().union(objects_only(2))
    with pytest.raises(ValueError, match="4 rows with 2 rows"):
        four_rows().select([], []).union(objects_only(2))


def test_select_keeps_what_is_named_and_everything_where_nothing_is() -> None:
    batch = four_rows()
    assert batch.select() == batch
    one = batch.select(["ids"], [], [])
    assert list(one.batch.keys()) == ["ids"] and one.non_tensor_batch == {} and one.meta_info == {}
    assert len(batch.select([], [])) == 4
    with pytest.raises(KeyError, match=r"no tensor column \['idz'\].*'ids'"):
        batch.select(["idz"])


def test_pop_gives_what_was_taken_and_the_rest() -> None:
    batch = four_rows()
    taken, rest = batch.pop(["ids"], ["uid"])
    assert list(taken.batch.keys()) == ["ids"] and list(taken.non_tensor_batch) == ["uid"]
    assert "ids" not in rest.batch and list(rest.non_tensor_batch) == ["ragged"]
    assert "ids" in batch.batch
    assert taken.union(rest) == batch


def test_rename_refuses_unknown_names_and_clashes() -> None:
    renamed = four_rows().rename({"ids": "tokens", "uid": "group"})
    assert "tokens" in renamed.batch and "group" in renamed.non_tensor_batch and "ids" not in renamed.batch
    swapped = four_rows().rename({"ids": "flag", "flag": "ids"})
    assert swapped.batch["ids"].dtype == torch.bool
    with pytest.raises(KeyError, match="idz"):
        four_rows().rename({"idz": "x"})
    for other in ("flag", "uid"):
        with pytest.raises(ValueError, match=f"'ids': '{other}'.*two columns would have one name"):
            four_rows().rename({"ids": other})


# --- rows again: repeat, reorder, pad -------------------------------------------------------------------------------


def test_repeat_interleaves_unless_told_otherwise() -> None:
    batch = objects_only(2)
    assert batch.repeat(2).non_tensor_batch["uid"].tolist() == ["0", "0", "1", "1"]
    assert batch.repeat(2, interleave=False).non_tensor_batch["uid"].tolist() == ["0", "1", "0", "1"]
    assert len(batch.repeat(0)) == 0
    assert four_rows().repeat(2).batch["ids"][:, 0].tolist() == [0, 0, 3, 3, 6, 6, 9, 9]


def test_reorder_takes_permutations_only() -> None:
    order = torch.tensor([2, 0, 3, 1])
    moved = four_rows().reorder(order)
    assert moved.batch["ids"][:, 0].tolist() == [6, 0, 9, 3]
    assert moved.reorder(torch.argsort(order)) == four_rows()
    for wrong in ([0, 1, 2], [0, 1, 2, 2]):
        with pytest.raises(ValueError, match="3 different rows of 4"):
            four_rows().reorder(wrong)


@pytest.mark.parametrize("k, pad_size", [(1, 0), (2, 0), (3, 2), (8, 4), (11, 7)])
def test_unpad_undoes_padding(k: int, pad_size: int) -> None:
    padded, size = four_rows().pad_to_multiple(k)
    assert size == pad_size and len(padded) == 4 + pad_size and len(padded) % k == 0
    assert padded.batch["ids"][:, 0].tolist() == [[0, 3, 6, 9][row % 4] for row in range(4 + pad_size)]
    assert padded.unpad(size) == four_rows()


def test_padding_an_empty_batch_leaves_it_empty() -> None:
    padded, pad_size = four_rows()[[]].pad_to_multiple(4)
    assert pad_size == 0 and len(padded) == 0
    with pytest.raises(ValueError, match="unpad"):
        padded.unpad(1)


@pytest.mark.parametrize("rows", [0, 3])
def test_batches_without_tensors_work_everywhere(rows: int) -> None:
    batch = objects_only(rows)
    assert len(batch) == rows
    assert [len(piece) for piece in batch.chunk(3)] == [rows // 3] * 3
    assert DataProto.concat(batch.chunk(3)) == batch
    assert batch.union(batch) == batch and copy_of(batch) == batch and batch.to("cpu") == batch
    assert len(batch.repeat(2)) == 2 * rows


def test_a_batch_without_any_column_works_everywhere(tmp_path: Any) -> None:
    batch = DataProto(meta_info={"step": 3})
    assert len(batch) == 0 and copy_of(batch) == batch and batch[:] == batch
    assert DataProto.concat([batch, batch]) == batch
    batch.save_to_disk(tmp_path)
    assert DataProto.load_from_disk(tmp_path) == batch


def test_no_method_changes_its_input(tmp_path: Any) -> None:
    batch, before = four_rows(), four_rows()
    batch.split(3), batch.chunk(3), DataProto.concat([batch, batch]), batch.select(["ids"]), batch.pop(["ids"])
    batch.rename({"ids": "x"}), batch.repeat(2), batch.reorder([3, 2, 1, 0]), batch.to("cpu"), batch.pad_to_multiple(3)
    batch.union(DataProto.from_dict({"new": torch.zeros(4)}, meta_info={"new": 1})), copy_of(batch)
    batch.save_to_disk(tmp_path)
    piece = batch[:2]
    piece.batch["extra"] = torch.zeros(2)
    piece.meta_info["extra"] = 1
    assert batch == before


# --- crossing processes ---------------------------------------------------------------------------------------------


def test_a_slice_ships_its_own_rows_only() -> None:
    big = DataProto.from_dict({"x": torch.randn(1000, 100), "y": torch.ones(1000, 50, dtype=torch.bfloat16)})
    payload = 10 * 100 * 4 + 10 * 50 * 2
    assert len(pickle.dumps(big[10:20])) < 1.2 * payload
    assert len(pickle.dumps(big[10:20], protocol=5)) < 1.2 * payload


def test_tensors_travel_as_views_of_the_senders_memory_and_arrive_without_a_copy() -> None:
    batch = DataProto.from_dict({"x": torch.arange(2000).view(1000, 2), "flag": torch.ones(1000, dtype=torch.bool)})
    buffers: list[pickle.PickleBuffer] = []
    in_band = pickle.dumps(batch[100:200], protocol=5, buffer_callback=buffers.append)
    assert [buffer.raw().nbytes for buffer in buffers] == [100 * 2 * 8, 100] and len(in_band) < 1000
    arrived = pickle.loads(in_band, buffers=buffers)
    assert arrived == batch[100:200]
    assert arrived.batch["x"].data_ptr() == batch.batch["x"].data_ptr() + 100 * 2 * 8


def test_read_only_buffers_arrive_without_a_warning_and_live_as_long_as_the_tensor() -> None:
    batch = DataProto.from_dict({"x": torch.arange(5).bfloat16()})
    buffers: list[pickle.PickleBuffer] = []
    in_band = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    memory = bytearray(buffers[0].raw())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = pickle.loads(in_band, buffers=[memoryview(memory).toreadonly()]).batch["x"]
    gc.collect()
    with pytest.raises(BufferError):  # a bytearray cannot grow while somebody holds its memory
        memory.append(0)
    assert tensor.tolist() == [0, 1, 2, 3, 4]
    del tensor
    memory.append(0)  # released as soon as the tensor is: the object store can free it


def test_every_dtype_and_object_survives_pickling_and_the_sender_is_untouched() -> None:
    dtypes = [torch.bfloat16, torch.float16, torch.float64, torch.bool, torch.int64, torch.int32, torch.uint8]
    batch = DataProto.from_dict({str(dtype): torch.tensor([[0, 1], [1, 0]]).to(dtype) for dtype in dtypes})
    batch = batch.union(DataProto.from_dict({"empty": torch.zeros(2, 0, 3)}, {"o": [[1, [2, "x"]], None]}))
    identities = {key: id(value) for key, value in batch.batch.items()}
    arrived = copy_of(batch)
    assert arrived == batch and arrived.batch["empty"].shape == (2, 0, 3)
    assert {key: id(value) for key, value in batch.batch.items()} == identities


def test_columns_that_are_not_contiguous_or_need_a_gradient_arrive_as_values() -> None:
    ids = torch.arange(12).view(4, 3)
    weights = torch.ones(4, requires_grad=True)
    batch = DataProto.from_dict({"tail": ids[:, 1:], "wide": torch.ones(4, 1).expand(4, 5), "w": weights})
    arrived = copy_of(batch)
    assert arrived == batch and arrived.batch["tail"].is_contiguous() and not arrived.batch["w"].requires_grad


# --- files ----------------------------------------------------------------------------------------------------------


def test_saving_uses_safetensors_and_json_and_loads_the_same_batch(tmp_path: Any) -> None:
    four_rows().save_to_disk(tmp_path / "new" / "dump")
    assert DataProto.load_from_disk(tmp_path / "new" / "dump") == four_rows()
    files = sorted(path.name for path in (tmp_path / "new" / "dump").iterdir())
    assert files == ["columns.json", "tensors.safetensors"]
    assert json.loads((tmp_path / "new" / "dump" / "columns.json").read_text())["rows"] == 4
    four_rows()[:2].save_to_disk(tmp_path / "new" / "dump")
    assert DataProto.load_from_disk(tmp_path / "new" / "dump") == four_rows()[:2]


def test_numpy_values_and_tuples_are_saved_as_plain_ones(tmp_path: Any) -> None:
    values = [np.float32(0.5), np.array([[1, 2]]), (1, "x"), {"n": np.int64(3), "b": np.bool_(True)}]
    DataProto.from_dict(non_tensors={"k": values}).save_to_disk(tmp_path)
    assert DataProto.load_from_disk(tmp_path).non_tensor_batch["k"].tolist() == [
        0.5,
        [[1, 2]],
        [1, "x"],
        {"n": 3, "b": True},
    ]


@pytest.mark.parametrize("value, what", [({1, 2}, "set"), (b"x", "bytes"), ({1: 2}, "keys that are not strings")])
def test_an_object_that_json_cannot_hold_is_an_error_naming_the_column(tmp_path: Any, value: Any, what: str) -> None:
    with pytest.raises(TypeError, match=f"object column 'extra_info' row 1 .*{what}"):
        DataProto.from_dict(non_tensors={"extra_info": [None, {"a": [value]}]}).save_to_disk(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TypeError, match="meta_info"):
        DataProto(meta_info={"m": value}).save_to_disk(tmp_path)


def test_two_columns_of_one_memory_are_saved_like_others(tmp_path: Any) -> None:
    scores = torch.randn(3, 2)
    batch = DataProto.from_dict({"token_level_scores": scores, "token_level_rewards": scores})
    batch.save_to_disk(tmp_path)
    assert DataProto.load_from_disk(tmp_path) == batch


def test_files_of_two_different_saves_are_refused(tmp_path: Any) -> None:
    four_rows().save_to_disk(tmp_path / "a")
    four_rows().save_to_disk(tmp_path / "b")
    (tmp_path / "a" / "columns.json").replace(tmp_path / "b" / "columns.json")
    with pytest.raises(ValueError, match="different saves"):
        DataProto.load_from_disk(tmp_path / "b")
