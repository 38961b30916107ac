"""Tables: a public schema decides how columns become numbers, never the records."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tptopk.data import findings, read_schema, read_table
from tptopk.data.table_checks import beyond_bounds, unit_findings
from tptopk.data.tables import (
    header_of,
    read_table_inputs,
    read_unit,
    read_with,
    schema_from,
    schema_of,
)
from tptopk.privacy.refusal import Refusal

WORDS = {
    "target": "ill",
    "classes": ["no", "yes"],
    "numeric": {"age": (0, 120), "dose": (-1.0, 1.0)},
    "categories": {"sex": ["f", "m"]},
}
HEAD = "id,age,dose,sex,ill\n"
ROWS = "1,0,-1,f,no\n2,120,1,m,yes\n3,60,0,x,no\n4,,9,,yes\n5,300,NA, f ,no\n"


@pytest.fixture
def table(tmp_path):
    def write(content: str, name: str = "table.csv"):
        (tmp_path / name).write_text(content, encoding="utf-8")
        return tmp_path / name

    return write


def test_columns_are_scaled_by_public_bounds_and_one_hot_by_public_categories(table):
    inputs, targets = read_table(table(HEAD + ROWS), **WORDS)
    assert schema_of(**WORDS).columns == ["age", "age missing", "dose", "dose missing", "sex=f", "sex=m", "sex=…"]
    assert inputs.dtype == torch.float32 and inputs.tolist() == [
        [-1, 0, -1, 0, 1, 0, 0],
        [1, 0, 1, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 0, 1],  # an unseen category
        [0, 1, 1, 0, 0, 0, 1],  # a missing age, a dose above its bound, a missing category
        [1, 0, 0, 1, 1, 0, 0],
    ]
    assert targets.tolist() == [0, 1, 0, 1, 0]


def test_an_infinite_number_is_beyond_its_bound_and_nan_is_missing(table):
    rows = "1,inf,-inf,f,no\n2,1e999,-Infinity,f,no\n3,nan,-nan,f,no\n4,1" + "0" * 400 + ",-1e999,f,no\n"
    inputs = read_table(table(HEAD + rows), **WORDS)[0][:, :4]
    assert inputs.tolist() == [[1, 0, -1, 0], [1, 0, -1, 0], [0, 1, 0, 1], [1, 0, -1, 0]]


def test_a_record_is_read_the_same_whatever_the_others_are(table):
    lines = ROWS.splitlines(keepends=True)
    together = read_table(table(HEAD + ROWS), **WORDS)[0]
    for line, inputs in zip(lines, together, strict=True):
        assert torch.equal(read_table(table(HEAD + line), **WORDS)[0][0], inputs)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (HEAD + "1,1,1,f,\n2,1,1,f,yes\n3,1,1,f,NA\n", "2 of 3 records have no label in 'ill'"),
        (HEAD + "1,1,1,f,maybe\n", "1 of 1 records have a label in 'ill' that is not one of the classes no, yes"),
        (HEAD + "1,elderly,1,f,no\n2,1,1,f,no\n", "1 of 2 values in 'age' are not numbers"),
        (HEAD + "1,1,1,f\n", "line 2: 4 values, but there are 5 columns"),
        (HEAD + "1,1,1,f,no,more\n", "line 2: 6 values"),
        (HEAD, "holds no records"),
        ("", "does not begin with the names"),
        ("id,Age,dose,sex,ill\n1,1,1,f,no\n", "has no column 'age'; did you mean 'Age'"),
        ("age,age,dose,sex,ill\n1,1,1,f,no\n", "more than one column 'age'"),
        (HEAD + '1,1,1,"f,no\n', "not a CSV file"),
    ],
)
def test_bad_tables_are_refused_with_counts_and_never_values(table, content, message):
    with pytest.raises(Refusal, match=message) as refused:
        read_table(table(content), **WORDS)
    assert "maybe" not in str(refused.value) and "elderly" not in str(refused.value)


def test_files_that_are_no_tables_are_refused(tmp_path):
    with pytest.raises(Refusal, match="there is no table"):
        read_table(tmp_path / "nowhere.csv", **WORDS)
    (tmp_path / "bytes.csv").write_bytes(HEAD.encode() + b"\xff\xfe\x00\n")
    with pytest.raises(Refusal, match="not a CSV file in UTF-8"):
        read_table(tmp_path / "bytes.csv", **WORDS)


def test_a_misspelt_table_gets_the_nearest_name(tmp_path, table):
    table(HEAD + ROWS, "clinic.csv")
    with pytest.raises(Refusal, match="there is no table .*clinics.csv; did you mean .*clinic.csv"):
        read_table(tmp_path / "clinics.csv", **WORDS)


@pytest.mark.parametrize(("mark", "word"), [(";", "semicolons"), ("\t", "tabs")])
def test_other_separators_are_named(table, mark, word):
    with pytest.raises(Refusal, match=f"separated by {word}; save it with commas"):
        read_table(table((HEAD + ROWS).replace(",", mark)), **WORDS)


@pytest.mark.parametrize("content", ["", "\n", "\n" + HEAD + ROWS, " , ,\n"])
def test_a_table_without_column_names_is_refused_with_those_expected(table, content):
    with pytest.raises(Refusal, match=r"table.csv does not begin with the names of its columns; expected .*ill"):
        read_table(table(content), **WORDS)


def test_latin_1_is_refused_with_how_to_save_it_and_without_a_place(tmp_path):
    (tmp_path / "table.csv").write_bytes(HEAD.encode() + "1,1,1,Ü,no\n".encode("latin-1"))
    with pytest.raises(Refusal, match="not a CSV file in UTF-8; save it as UTF-8") as refused:
        read_table(tmp_path / "table.csv", **WORDS)
    assert "position" not in str(refused.value) and "0xdc" not in str(refused.value)


def test_a_unit_is_a_column_of_ids_and_no_input(table):
    schema = schema_of(**WORDS, unit="patient_id", most_rows=2)
    path = table(HEAD.replace("id,", "patient_id,") + "7,0,0,f,no\n8,0,0,f,no\n7,1,0,f,no\n7,2,0,f,no\n")
    assert read_unit(path, schema) == ["7", "8", "7", "7"] and schema.unit_word == "patient"
    assert schema.columns == schema_of(**WORDS).columns and read_with(path, schema)[0].shape == (4, 7)
    assert unit_findings(read_unit(path, schema), schema).startswith("2 patients, 1 of them with more than 2 records")
    assert header_of(path) == ["patient_id", "age", "dose", "sex", "ill"]
    with pytest.raises(Refusal, match="2 of 3 records have no 'patient_id'; give each the id of its patient"):
        read_unit(table("patient_id\n7\nNA\n''\n".replace("''", '""')), schema)


def test_a_schema_survives_plain_values_and_knows_another(table):
    schema = schema_of(**WORDS, unit="id", most_rows=2, test="t.csv")
    again = schema_from(schema.as_values(), "schema.json")
    assert again.same_as(schema) and again.test is None and again.most_rows == 2
    assert schema_of(**{**WORDS, "numeric": {"age": (0.0, 120.0), "dose": (-1, 1)}}).same_as(schema_of(**WORDS))
    for change in (
        {"numeric": {"age": (0, 121), "dose": (-1.0, 1.0)}},
        {"numeric": {"dose": (-1.0, 1.0), "age": (0, 120)}},  # inputs in another order
        {"classes": ["yes", "no"]},
        {"unit": "id", "most_rows": 3},
    ):
        assert not schema_of(**{**WORDS, **change}).same_as(schema_of(**WORDS)), change


def test_a_byte_order_mark_and_windows_lines_are_read(tmp_path):
    (tmp_path / "table.csv").write_bytes(b"\xef\xbb\xbf" + b"ill,age,dose,sex\r\nyes,1,1,f\r\n\r\n")
    assert read_table(tmp_path / "table.csv", **WORDS)[1].tolist() == [1]


def test_constant_and_missing_columns_are_accepted_and_found(table):
    schema = schema_of(**WORDS)
    pair = read_with(table(HEAD + "1,5,1,f,no\n2,5,NA,x,yes\n3,5,1,m,yes\n"), schema)
    assert findings(pair, 2, schema) == [
        "column 'age' is the same in all records",
        "1 record has no number in column 'dose'",
        "1 record has an unseen category or none in column 'sex'",
    ]
    assert schema.inputs_in_words() == "7 inputs = 2 numbers × 2 + sex 3; 2 classes"


def test_numbers_outside_their_bounds_are_clipped_and_found(table):
    schema = schema_of(**WORDS)
    path = table(HEAD + "1,-1e400,1,f,no\n2,60,NA,f,yes\n3,121,1,m,yes\n")
    (low, high), inputs = schema.numeric["age"], read_with(path, schema)[0]
    assert (low, high) == (0, 120) and inputs[:, 0].tolist() == [-1, 0, 1]
    assert beyond_bounds(path, schema) == [
        "2 records have a number outside [0, 120] in column 'age', which counts as the nearest bound"
    ]


def test_inputs_alone_need_no_labels(table):
    inputs = read_table_inputs(table("sex,dose,age\nm,0,60\n"), schema_of(**WORDS))
    assert inputs.tolist() == [[0, 0, 0, 0, 0, 1, 0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"numeric": {}, "categories": {}}, "needs columns to learn from"),
        ({"numeric": {"age": (120, 0)}}, r"bounds of column 'age' are \[120, 0\]; write the least first"),
        ({"numeric": {"age": (5, 5)}}, r"bounds of column 'age' are \[5, 5\]"),
        ({"numeric": {"age": (0, float("inf"))}}, "upper bound of column 'age' is inf"),
        ({"numeric": {"age": 120}}, "bounds of 'age' are 120"),
        ({"numeric": {"age": ("0", "9")}}, "lower bound of column 'age' is '0'"),
        ({"categories": {"sex": []}}, "values of 'sex'"),
        ({"categories": {"sex": ["f", "f"]}}, "give each once"),
        ({"categories": {"sex": "fm"}}, "give a list"),
        ({"categories": {"age": ["f"]}}, "'age' has two roles"),
        ({"categories": {"ill": ["f"]}}, "'ill' has two roles"),
        ({"classes": ["no"]}, "at least two"),
        ({"unit": "id"}, "unit and most-rows go together"),
        ({"most_rows": 3}, "unit and most-rows go together"),
        ({"unit": "id", "most_rows": 0}, "most-rows is 0"),
        ({"unit": "age", "most_rows": 3}, "'age' is the unit; it must not be the target or an input"),
        ({"unit": "ill", "most_rows": 3}, "'ill' is the unit"),
        ({"unit": "record_id", "most_rows": 3}, "leave it out"),
    ],
)
def test_a_wrong_schema_is_refused(change, message):
    with pytest.raises(Refusal, match=message):
        schema_of(**{**WORDS, **change})


def test_a_schema_file_says_the_same_words(tmp_path):
    path = tmp_path / "table.toml"
    path.write_text(
        'target = "ill"\nclasses = [0, 1]\ntest = "t.csv"\n[numeric]\nage = [0, 120]\n[categories]\nsex = ["f"]\n'
    )
    schema = read_schema(path)
    assert schema.classes == ("0", "1") and schema.test == "t.csv" and schema.columns[-1] == "sex=…"
    for content, message in (
        ('target = "ill"', "has no classes"),
        ("targets = 3", "did you mean 'target'"),
        ("most_rows = 3", "did you mean 'most-rows'"),
        ("target = 3", "target is 3"),
        ("target = ", "not a TOML file"),
        ('target = "ill"\nclasses = [0, 1]', "needs columns"),
    ):
        path.write_text(content)
        with pytest.raises(Refusal, match=message) as refused:
            read_schema(path)
        assert str(path) in str(refused.value)
    with pytest.raises(Refusal, match=r"cannot read the schema .*target = "):
        read_schema(tmp_path / "nowhere.toml")


def test_parquet_is_read_as_the_same_csv(table, tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    from pyarrow import parquet

    columns = {
        "age": [0.0, None, float("nan")],
        "dose": [1, -1, 0],
        "sex": ["f", None, "x"],
        "ill": [True, False, True],
        "site": [1.0, 2.0, None],
    }
    words = {**WORDS, "classes": ["false", "true"], "categories": {"sex": ["f", "m"], "site": [1, 2]}}
    parquet.write_table(pyarrow.table(columns), tmp_path / "table.parquet")
    csv = table("age,dose,sex,ill,site\n0,1,f,true,1\n,-1,,false,2\nnan,0,x,true,\n")
    for one, other in zip(read_table(tmp_path / "table.parquet", **words), read_table(csv, **words), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(Refusal, match="has no column 'kind'"):
        read_table(tmp_path / "table.parquet", **{**words, "numeric": {"kind": (0, 1)}})
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "table.parquet").read_bytes()[:50])
    with pytest.raises(Refusal, match="cannot be read as a Parquet file"):
        read_table(tmp_path / "cut.parquet", **words)


def test_without_pyarrow_the_refusal_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "table.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(Refusal, match=r"tptopk\[tables\]"):
        read_table(tmp_path / "table.parquet", **WORDS)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.one_of(st.binary(max_size=80), st.text(max_size=80).map(str.encode)))
def test_whatever_a_table_holds_inputs_are_bounded_or_it_is_refused(tmp_path, content):
    (tmp_path / "table.csv").write_bytes(HEAD.encode() + content)
    try:
        inputs, _ = read_table(tmp_path / "table.csv", **WORDS)
    except Refusal:
        return
    assert np.isfinite(inputs.numpy()).all() and inputs.abs().max() <= 1
