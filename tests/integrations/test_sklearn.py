"""The scikit-learn estimator: its conventions, and that nothing about the records leaks through preprocessing."""

from __future__ import annotations

import json
import math
import pickle
import runpy
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_classifiers_train, parametrize_with_checks

from tptopk import PrivacyWarning, Refusal
from tptopk.data.columns import Categories, Number, encode
from tptopk.integrations.sklearn import TPTopKClassifier
from tptopk.training.begun import how_to_resume
from tptopk.training.mechanism import Mechanism
from tptopk.training.verify import verify

FAST = {"accountant": "rdp", "epochs": 8, "batch_size": 0.5, "learning_rate": 0.5, "clip_norm": 1.0}
undeclared = pytest.mark.filterwarnings("ignore:read from the data:tptopk.privacy.plan.PrivacyWarning")

LESS_THAN_NOISE = {
    "check_classifiers_train": "asks for 83% on 300 records in three classes after a few steps, more than noise for ε = 3 leaves; "
    "passes with less noise, see the next test",
}


@undeclared
@pytest.mark.filterwarnings("ignore:The number of unique classes:UserWarning")
@parametrize_with_checks(
    [TPTopKClassifier(**FAST, bounds=(-3, 3))], expected_failed_checks=lambda estimator: LESS_THAN_NOISE
)
def test_scikit_learn_checks_pass_where_they_make_sense(estimator, check):
    check(estimator)


@undeclared
def test_the_check_of_accuracy_passes_with_less_noise():
    check_classifiers_train("TPTopKClassifier", TPTopKClassifier(**FAST, bounds=(-3, 3), epsilon=100.0))


def made(records: int = 60, seed: int = 0):
    generator = np.random.default_rng(seed)
    table = generator.uniform(-1, 1, (records, 3))
    return table, np.where(table[:, 0] > 0, "yes", "no")


def declared(**changes):
    return TPTopKClassifier(
        **{**FAST, "classes": ["no", "yes"], "dataset_size": 60, "bounds": (-1, 1), "random_state": 0, **changes}
    )


def test_a_run_is_within_its_budget_and_says_what_it_did():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted = declared(random_state=None).fit(*made())
    assert 2.99 < fitted.epsilon_ <= 3.0 and fitted.delta_ == 1e-5 == fitted.plan_.delta
    assert fitted.plan_.dataset_size == 60 and fitted.plan_.method == "tp-topk"
    assert fitted.run_.support.ratio == pytest.approx(0.4, abs=0.13)  # of eight coordinates
    said = fitted.statement()
    assert "labels and the number of records were declared" in said and "Not for release" not in said


def test_a_random_state_repeats_the_run_and_is_said_not_to_be_for_release():
    table, labels = made()
    one, other = (declared(random_state=3).fit(table, labels) for _ in range(2))
    assert np.array_equal(one.predict_proba(table), other.predict_proba(table))
    assert "Not for release" in one.statement()
    fresh, again = (declared(random_state=None).fit(table, labels) for _ in range(2))
    assert not np.array_equal(fresh.predict_proba(table), again.predict_proba(table))
    state = np.random.RandomState(0)
    assert "Not for release" in declared(random_state=state, hidden=(4,)).fit(table, labels).statement()


def test_torchs_own_generator_is_left_alone():
    before = torch.get_rng_state()
    declared(hidden=(4,)).fit(*made())
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("undeclared", "said"), [({"classes": None}, "the class labels"), ({"dataset_size": None}, "the number of records")]
)
def test_what_is_read_from_the_data_is_said(undeclared, said):
    estimator = declared(**undeclared)
    with pytest.warns(PrivacyWarning, match=f"read from the data, .*: {said};"):
        estimator.fit(*made())
    assert f"not covered**: {said}," in estimator.statement()


def test_declared_classes_stand_even_if_no_record_has_them():
    table, labels = made()
    estimator = declared(classes=["yes", "unknown", "no"]).fit(table, labels)
    assert estimator.classes_.tolist() == ["no", "unknown", "yes"]
    assert estimator.predict_proba(table).shape == (60, 3)


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


def test_a_run_folder_can_be_verified_and_needs_what_it_states(tmp_path):
    table, labels = made()
    fitted = declared(out=tmp_path / "run", random_state=None).fit(table, labels)
    verdict = verify(tmp_path / "run")
    assert verdict.holds and verdict.epsilon == fitted.epsilon_
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run["config"]["bounds"] == "(-1, 1)" and "random_state" not in run["config"]
    with pytest.raises(Refusal, match="would be read from the data: declare classes"):
        declared(out=tmp_path / "other", classes=None).fit(table, labels)
    assert not (tmp_path / "other").exists()


def test_a_run_that_was_cut_short_goes_on_with_what_it_was_begun_with(tmp_path, monkeypatch):
    table, labels = made()
    settings = {"out": tmp_path / "run", "random_state": None, "optimizer": "sgd"}
    honest, steps = Mechanism.private_gradient, []

    def interrupted(self, *given):
        steps.append(given)
        if len(steps) == 7:
            raise KeyboardInterrupt
        return honest(self, *given)

    monkeypatch.setattr(Mechanism, "private_gradient", interrupted)
    with pytest.raises(KeyboardInterrupt):
        declared(**settings).fit(table, labels)
    assert "TPTopKClassifier(…, out=" in how_to_resume(tmp_path / "run")
    for other, message in (
        ({"bounds": (-2, 2)}, "begun with other columns"),
        ({"hidden": (4,)}, r"begun with hidden = \(\)"),
        ({"optimizer": lambda weights: torch.optim.SGD(weights, 50.0)}, "begun with optimizer = 'sgd'"),
        ({"out": None}, "give it as out="),
        ({"out": tmp_path / "rum"}, "did you mean"),
    ):
        with pytest.raises(Refusal, match=message):
            declared(**{**settings, "resume": True, **other}).fit(table, labels)
    assert len(steps) == 7, "nothing was charged"
    fitted = declared(**settings, resume=True).fit(table, labels)
    assert fitted.run_.facts.attempts == 2 and fitted.epsilon_ <= fitted.epsilon and verify(tmp_path / "run").holds
    with pytest.raises(Refusal, match="finished"):
        declared(**settings, resume=True).fit(table, labels)


def test_a_run_is_not_resumed_on_columns_in_another_order_or_bounds_that_are_printed_short(tmp_path, monkeypatch):
    arrow = pytest.importorskip("pyarrow", reason="tables with names need pyarrow here")
    table, labels = made()
    wide = np.tile(table, 400)  # NumPy prints so many bounds as a few and dots
    bounds = np.array([(-1.0, 1.0)] * wide.shape[1])
    settings = {"out": tmp_path / "run", "random_state": None, "bounds": bounds}
    names = [f"c{i}" for i in range(wide.shape[1])]

    def named(order):
        return arrow.table(dict(zip(order, wide.T, strict=True)))

    honest = Mechanism.private_gradient

    def interrupted(self, batches, support, phase, step):
        if step == 3:
            raise KeyboardInterrupt
        return honest(self, batches, support, phase, step)

    monkeypatch.setattr(Mechanism, "private_gradient", interrupted)
    with pytest.raises(KeyboardInterrupt):
        declared(**settings).fit(named(names), labels)
    monkeypatch.setattr(Mechanism, "private_gradient", honest)
    other = bounds.copy()
    other[500] = (-2.0, 2.0)
    assert repr(other) == repr(bounds)
    for changes, order in (({"bounds": other}, names), ({}, [names[1], names[0], *names[2:]])):
        with pytest.raises(Refusal, match="other columns, or the same in another order"):
            declared(**{**settings, **changes}, resume=True).fit(named(order), labels)
    assert declared(**settings, resume=True).fit(named(names), labels).run_.facts.attempts == 2


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


SECRET = "Mme-Dupont"


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
    assert number.inputs(np.array(["inf", "-1e999", "nan", 10**400], object)).tolist() == [
        [1, 0],
        [-1, 0],
        [0, 1],
        [1, 0],
    ]
    table, labels = made()
    table[::7, 1], clipped = math.inf, table.copy()
    clipped[::7, 1] = 1
    found = [declared(missing=True).fit(x, labels).predict_proba(x) for x in (table, clipped)]
    assert np.array_equal(*found)


def test_a_label_that_is_no_class_is_refused_without_saying_it():
    table, labels = made()
    labels = labels.astype(object)
    labels[11] = SECRET
    with pytest.raises(Refusal, match="none of the declared classes") as refused:
        declared().fit(table, labels)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"classes": ["no"]}, "only one class"),
        ({"classes": ["no", "no", "yes"]}, "give each label once"),
        ({"classes": ["no", 1, None]}, "which can be sorted|none of the declared"),
        ({"bounds": (1, -1)}, r"bounds of column 0 are \[1, -1\]; write the least first"),
        ({"bounds": "wide"}, "neither one pair"),
        ({"bounds": 3}, "neither one pair"),
        (
            {"bounds": {0: (0, 1)}},
            "column 1 has no bounds.*or leave the column out: an identifier must not be an input",
        ),
        ({"bounds": [(0, 1), None, (0, 1)]}, "column 1 has no bounds"),
        ({"bounds": {"age": (0, 1)}}, "bounds names a column 'age' that the table does not have"),
        ({"bounds": (0, math.inf)}, "upper bound of column 0 is inf"),
        ({"categories": {9: ["a"]}}, "categories names a column 9"),
        ({"categories": {0: []}}, "give each once, and at least one"),
        ({"categories": {0: "ab"}}, "give a list of them"),
        ({"categories": {0: 0}}, "number of buckets of column 0 is 0"),
        ({"dataset_size": 61}, "declares a dataset of 61 records and this one has 60"),
        ({"batch_size": 1.5}, "batch_size is 1.5"),
        ({"batch_size": 61}, "batch_size is 61"),
        ({"hidden": (0,)}, "a hidden width is 0"),
        ({"hidden": 16}, "hidden is 16; give a list of widths"),
        ({"optimizer": "sdg"}, "did you mean 'sgd'"),
        ({"learning_rate": -1.0}, "learning_rate is -1.0"),
        ({"method": "tp-topq"}, "did you mean 'tp-topk'"),
        ({"epsilon": 0}, "epsilon is 0"),
        ({"unit": "patient"}, "give fit groups="),
    ],
)
def test_wrong_parameters_are_refused_with_what_to_say_instead(changes, message):
    with pytest.raises(Refusal, match=message):
        declared(**changes).fit(*made())


def test_a_fit_that_is_refused_leaves_the_last_model_as_it_was():
    table, labels = made()
    fitted = declared(bounds=(-2, 2)).fit(table, labels)
    before = fitted.predict_proba(table)
    with pytest.raises(Refusal):
        fitted.set_params(bounds=(-1, 1), epochs=0).fit(table, labels)
    assert np.array_equal(fitted.predict_proba(table), before)


def test_groups_are_what_is_protected():
    table, labels = made()
    patients = [f"patient {i // 3}" for i in range(60)]
    fitted = declared(dataset_size=20, unit="patient", most_rows=3).fit(table, labels, groups=patients)
    assert fitted.plan_.unit == "patient" and fitted.plan_.dataset_size == 20
    assert "one patient, with all its records" in fitted.statement()
    with pytest.warns(PrivacyWarning, match="read from the data, .*: the number of groups;"):
        assert declared(dataset_size=None, most_rows=2).fit(table, labels, groups=patients).plan_.dataset_size == 20
    for wrong, groups in ((None, patients), (3, None)):
        with pytest.raises(Refusal, match=f"most_rows is {wrong}"):
            declared(dataset_size=20, most_rows=wrong).fit(table, labels, groups=groups)


def test_an_account_pays_for_the_fit(tmp_path):
    from tptopk.privacy.account import open_account

    path = tmp_path / "clinic.account"
    open_account(path, 3.5, 1e-5)
    estimator = declared(account=path, random_state=None)
    estimator.fit(*made())
    with pytest.raises(Refusal, match="account"):
        estimator.fit(*made())


def test_a_fitted_estimator_is_pickled_without_a_secret():
    table, labels = made()
    fitted = declared(random_state=None, hidden=(4,)).fit(table, labels)
    content = pickle.dumps(fitted)
    assert b"Streams" not in content and b"Ledger" not in content and b"Generator" not in content
    assert np.array_equal(pickle.loads(content).predict_proba(table), fitted.predict_proba(table))
    assert pickle.loads(content).statement() == fitted.statement()
    with pytest.raises(NotFittedError):
        clone(fitted).statement()


@undeclared
def test_it_works_in_pipelines_and_searches():
    table, labels = made()
    search = GridSearchCV(
        make_pipeline(FunctionTransformer(np.tanh), declared(dataset_size=None)),
        {"tptopkclassifier__epsilon": np.array([1, 50]), "tptopkclassifier__hidden": [(), (np.int64(3),)]},
        cv=2,
    )
    assert search.fit(table, labels).best_score_ > 0.5


def test_optimizers_and_methods():
    table, labels = made()
    for changes in (
        {"optimizer": "adam", "learning_rate": 0.05},
        {"optimizer": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01)},
        {"method": "dp-sgd"},
        {"method": "on-topk"},
        {"batch_size": 30},
    ):
        assert declared(**changes).fit(table, labels).score(table, labels) > 0.4
    with pytest.warns(PrivacyWarning, match="NOT private"):
        ordinary = declared(method="non-private", epochs=40).fit(table, labels)
    assert math.isinf(ordinary.epsilon_) and ordinary.score(table, labels) > 0.9


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


def test_breast_cancer_is_learnt_with_bounds_that_were_not_read_from_it():
    """One split of what `benchmarks/breast_cancer.py` measures, with one seed and the faster accountant."""
    public = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "breast_cancer.py"))["bounds"]()
    table, labels = load_breast_cancer(return_X_y=True)
    estimator = TPTopKClassifier(classes=[0, 1], dataset_size=455, bounds=public, accountant="rdp", random_state=0)
    assert estimator.fit(table[:455], labels[:455]).score(table[455:], labels[455:]) > 0.85
