"""The scikit-learn estimator: how it reads a table, and that nothing about the records leaks through it."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch

from tests.integrations.estimators import SECRET, declared, made
from tptopk import PrivacyWarning, Refusal
from tptopk.data.columns import Categories, Number, encode


def test_a_record_becomes_the_same_inputs_whatever_the_others_are():
    columns = [Number(0, 0, 10, True), Categories.declared(1, ["f", "m"]), Categories.declared(2, 4)]
    table = np.array([[5, "f", "a"], [20, "x", "b"], [None, None, None], [-3, "m", 1.0]], dtype=object)
    together = encode(table, columns)
    assert together[:, :5].tolist() == [[0, 0, 1, 0, 0], [1, 0, 0, 0, 1], [0, 1, 0, 0, 1], [-1, 0, 0, 1, 0]]
    assert together[:, 5:].sum(1).tolist() == [1, 1, 1, 1]
    for i in range(len(table)):
        assert torch.equal(encode(table[i : i + 1], columns)[0], together[i])


def test_the_hash_is_the_same_on_every_machine():
    buckets = Categories.declared("city", 10)
    words = np.array(["Athens", "Bern", "Delhi", 7, 7.0, "7"], dtype=object)
    assert buckets.inputs(words).argmax(1).tolist() == [3, 5, 4, 5, 5, 5]


def test_values_outside_their_bounds_are_clipped_in_silence():
    table, labels = made()
    far = np.where(np.abs(table) > 0.5, table * 1e6, table)
    near = np.where(np.abs(table) > 0.5, np.sign(table) * 0.5, table)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one, other = (declared(bounds=(-0.5, 0.5)).fit(x, labels) for x in (far, near))
    assert np.array_equal(one.predict_proba(far), other.predict_proba(near))


def test_bounds_that_were_forgotten_are_said_whatever_the_table_holds():
    table, labels = made()
    with pytest.warns(UserWarning, match="no bounds were given"):
        forgotten = declared(bounds=None).fit(table, labels)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.simplefilter("ignore", PrivacyWarning)
        given = declared(bounds=(-1, 1)).fit(table, labels)
        declared(bounds=None, categories={0: ["a"], 1: ["b"], 2: ["c"]}).fit(table, labels)  # nothing to bound
    assert np.array_equal(forgotten.predict_proba(table), given.predict_proba(table))


def test_bounds_may_be_a_pair_a_list_or_a_dictionary():
    table, labels = made()
    pairs = [(-1, 1), (-1, 1), (-1, 1)]
    found = [
        declared(bounds=bounds).fit(table, labels).predict_proba(table)
        for bounds in ((-1, 1), pairs, np.array(pairs), dict(enumerate(pairs)))
    ]
    assert all(np.array_equal(found[0], other) for other in found[1:])
    two = declared(bounds=[(-1, 1), (-1, 1)])  # two pairs are not one pair of pairs
    with pytest.raises(Refusal, match="neither one pair nor 3 of them"):
        two.fit(table, labels)


@pytest.mark.parametrize(
    ("value", "changes", "message"),
    [
        (math.nan, {}, "column 1 contains NaN"),
        (math.inf, {}, "column 1 contains NaN, infinite"),
        (None, {}, "column 1 contains NaN"),
        ("", {}, "column 1 contains NaN"),
        ("NA", {}, "column 1 contains NaN"),
        (SECRET, {}, "column 1 holds text"),
        (SECRET, {"missing": True}, "column 1 holds text"),
        ({SECRET: 1}, {"missing": True}, "column 1 every argument must be"),
    ],
)
def test_bad_tables_are_refused_without_the_value_or_the_record(value, changes, message):
    table, labels = made()
    for place in (0, 37):
        bad = table.astype(object)
        bad[place, 1] = value
        with pytest.raises(ValueError, match="numeric column|column 1") as refused:
            declared(**changes).fit(bad, labels)
        assert message in str(refused.value).replace("in the numeric ", "").replace("the numeric ", "")
        assert SECRET not in str(refused.value) and "37" not in str(refused.value)
        assert refused.value.__context__ is None and refused.value.__cause__ is None
        fitted = declared(**changes).fit(table, labels)
        with pytest.raises(ValueError, match="column 1"):
            fitted.predict(bad)


def test_missing_values_are_taken_where_declared():
    table, labels = made()
    for empty in (math.nan, None, "", "NA"):
        holes = table.astype(object)
        holes[::7, 1] = empty
        fitted = declared(missing=True).fit(holes, labels)
        assert np.isfinite(fitted.predict_proba(holes)).all()
        assert fitted.run_.model[0].in_features == 6


@pytest.mark.parametrize("dtype", [float, object])
def test_an_infinite_number_is_beyond_its_bound_and_nan_is_missing(dtype):
    values = np.array([math.inf, -math.inf, math.nan, 5.0], dtype)
    number = Number.declared("dose", (0, 10), missing=True)
    assert number.inputs(values).tolist() == [[1, 0], [-1, 0], [0, 1], [0, 0]]
    words = np.array(["inf", "-1e999", "nan", 10**400], object)
    assert number.inputs(words).tolist() == [[1, 0], [-1, 0], [0, 1], [1, 0]]
    table, labels = made()
    table[::7, 1], clipped = math.inf, table.copy()
    clipped[::7, 1] = 1
    found = [declared(missing=True).fit(x, labels).predict_proba(x) for x in (table, clipped)]
    assert np.array_equal(*found)


@pytest.mark.parametrize(
    "table, message",
    [
        ([987654.321, 2.0], "not a table of two dimensions"),
        (np.full((2, 2), 987654.321 + 1j), "Complex data not supported"),
    ],
)
def test_a_table_of_one_dimension_or_of_complex_numbers_is_refused_without_its_values(table, message):
    for act in (lambda: declared().fit(table, [0, 1]), lambda: declared().fit(*made()).predict(table)):
        with pytest.raises(Refusal, match=message) as refused:
            act()
        assert "987654" not in str(refused.value) and refused.value.__context__ is None


def test_data_frames_are_read_by_their_names():
    pandas = pytest.importorskip("pandas", reason="data frames need pandas")
    table, labels = made()
    frame = pandas.DataFrame({"age": 60 + 60 * table[:, 0], "sex": np.where(table[:, 1] > 0, "f", "m"), "site": 1})
    frame["sex"] = frame["sex"].astype("category")
    given = {"bounds": {"age": (0, 120)}, "categories": {"sex": ["f", "m"], "site": 5}}
    fitted = declared(**given).fit(frame, pandas.Series(labels))
    assert fitted.feature_names_in_.tolist() == ["age", "sex", "site"] and fitted.run_.model[0].in_features == 9
    assert set(fitted.predict(frame)) <= {"no", "yes"}
    with pytest.raises(ValueError, match="feature names"):
        fitted.predict(frame.rename(columns={"age": "Age"}))
    with pytest.raises(Refusal, match="did you mean 'age'"):
        declared(**{**given, "bounds": {"agee": (0, 120)}}).fit(frame, labels)
    with pytest.raises(Refusal, match="numeric column 'sex' holds text"):
        declared(bounds=dict.fromkeys(frame, (0, 120))).fit(frame, labels)
    holes = frame.assign(age=frame["age"].round().astype("Int64").where(frame.index % 9 > 0))
    with pytest.raises(Refusal, match="column 'age' contains NaN"):
        declared(**given).fit(holes, labels)
    assert declared(**given, missing=True).fit(holes, labels).predict(holes).shape == (60,)
