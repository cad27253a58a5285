"""examples/python_questions.py: right answers are what the file says, wrong ones are not, and pairs are counted."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
from example_modules import load_example

CODE = (
    "import os\n\n\ndef first(alpha, gamma):\n    if alpha:\n        return [os.path.join(alpha, gamma)]\n"
    "    return max(alpha, (gamma))\n\n\nvalue = first(1, 2)\nother = first({3: 4}, 55)\n"
)


@pytest.fixture(scope="module")
def examples() -> ModuleType:
    return load_example("python_questions")


def test_places_hold_what_the_file_says_there(examples: ModuleType) -> None:
    source = examples.Source.of(CODE)
    for kind, places in examples.KINDS.items():
        found = list(places(source))
        assert found, kind
        for place in found:
            assert CODE[place.start :].startswith(place.right), kind
            assert place.right not in place.wrong, kind
    indented = {(p.right, tuple(p.wrong[:2])) for p in examples.indentations(source)}
    assert ("        return", ("return", "    return")) in indented
    assert ("def", ("    def", "        def")) in indented
    same_length = {name.right: name.wrong for name in examples.names(source)}
    assert same_length["alpha"] == ["first", "gamma", "other", "value"]
    assert "if" not in same_length
    closing = [p.right for p in examples.closings(source)]
    assert closing == ["):", ")]", "]", "))", ")", ")", "},", ")"]  # each closing bracket is a place
    assert {p.right for p in examples.arguments(source)} >= {"alpha,", "gamma)", "1,", "2)", "55)"}


@pytest.mark.few(0)
def test_questions_are_the_same_every_time_and_their_answers_at_random_places(examples: ModuleType) -> None:
    sources = examples.held_out(examples.read_corpus())
    asked = examples.questions(sources, each=100)
    assert asked == examples.questions(sources, each=100)
    assert Counter(q.kind for q in asked) == dict.fromkeys(examples.KINDS, 100)
    for question in asked:
        assert len(set(question.choices)) == examples.CHOICES
        assert question.prompt + question.choices[question.answer] in sources[question.file].text
        assert len(question.prompt) == examples.CONTEXT
        assert max(map(len, question.choices)) <= examples.LONGEST
    places = Counter(q.answer for q in asked)
    assert all(70 < places[place] < 130 for place in range(4))  # 100 are expected of 400
    with pytest.raises(ValueError, match=r"`each` must be at most \d+ of indentation, got 1000000"):
        examples.questions(sources, each=1_000_000)


@pytest.mark.few(0)
def test_the_folder_is_what_lm_eval_takes(examples: ModuleType, tmp_path: Path) -> None:
    asked = examples.build(tmp_path, each=5)
    lines = (tmp_path / "name.jsonl").read_text().splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == [q.prompt for q in asked if q.kind == "name"]
    assert f'test: "{tmp_path}/name.jsonl"' in (tmp_path / "name.yaml").read_text()
    assert "python_questions_closing" in (tmp_path / "group.yaml").read_text()


def test_pairs_are_counted_as_mcnemar_does(examples: ModuleType) -> None:
    first, second = [1] * 50 + [0] * 30 + [1] * 15 + [0] * 5, [1] * 50 + [0] * 30 + [0] * 15 + [1] * 5
    found = examples.paired(first, second)
    assert found.difference == pytest.approx(-0.10)
    assert found.error == pytest.approx(math.sqrt(20 - 100 / 100) / 100)
    assert found.p == pytest.approx(2 * sum(math.comb(20, k) for k in range(6)) / 2**20)
    assert examples.paired(first, first) == (0.0, 0.0, 1.0)
    assert examples.accuracy([1, 1, 1, 0]) == (0.75, pytest.approx(math.sqrt(0.75 * 0.25 / 4)))
    with pytest.raises(ValueError, match="the same questions, got 3 and 2"):
        examples.paired([1, 0, 1], [1, 0])


def test_answers_to_other_questions_are_not_compared(examples: ModuleType, tmp_path: Path) -> None:
    for name, questions, right in (("one", "a", [1, 1]), ("two", "a", [1, 0]), ("three", "b", [1, 1])):
        content = {"questions": questions, "answers": {kind: right for kind in examples.KINDS}}
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    table = examples.compare([tmp_path / "one.json", tmp_path / "two.json"])
    assert "| two | all | 50.0% ± 17.7 | -50.0 ± 17.7 | 0.12 |" in table
    with pytest.raises(SystemExit, match="build them once"):
        examples.compare([tmp_path / "one.json", tmp_path / "three.json"])
    for content, got in (("{", "JSON"), ("[]", "TypeError"), ('{"questions": "a", "answers": {"name": []}}', "none")):
        (tmp_path / "odd.json").write_text(content)
        with pytest.raises(SystemExit, match=f"odd.json must hold answers .*, got {got}"):
            examples.compare([tmp_path / "odd.json"])


@pytest.mark.parametrize("name", ["finetune_labels", "evaluate_litgpt"])
def test_a_folder_that_is_no_checkpoint_is_an_error_and_no_traceback(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load_example(name)
    if name == "evaluate_litgpt":
        monkeypatch.setattr(example, "check_installed", lambda: None)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(sys, "argv", [name, str(tmp_path)])
    for file in ("lit_model.pth", "model_config.yaml"):
        with pytest.raises(SystemExit, match="2"):
            example.main()
        assert f"The checkpoint must be a folder with a {file}, got {tmp_path}" in capsys.readouterr().err
        (tmp_path / file).touch()


def test_windows_of_labels_are_of_other_files_and_a_model_learns_to_name_them(tmp_path: Path) -> None:
    """A library of ten packages whose files say their own name: whoever learns anything names them."""
    finetune = load_example("finetune_labels")
    for package in finetune.PACKAGES:
        (tmp_path / package).mkdir(parents=True)
        for number in range(12):
            (tmp_path / package / f"{number}.py").write_text(f"{package} " * 40)
    train, test = finetune.read(16, tmp_path)
    assert (len(train.labels), len(test.labels)) == (10 * finetune.TRAINED, 10 * finetune.TESTED)
    assert train.labels.bincount().tolist() == [finetune.TRAINED] * 10
    again, _ = finetune.read(16, tmp_path)
    assert train.inputs.equal(again.inputs)
    shape = {"n_layer": 1, "n_embd": 32, "n_head": 2, "intermediate_size": 64}
    gpt = load_example("pretrain_python").build_gpt("tiny", 16, shape)
    few = finetune.Windows(test.inputs[:200], test.labels[:200])
    rate, tried, found = finetune.finetune(gpt, train, few, 60, (3e-3,))
    assert (rate, tried) == (3e-3, {})
    assert sum(found) > 60  # chance is 20; measured 100 and more
    with pytest.raises(ValueError, match="test/test_asyncio must be in the standard library"):
        finetune.read(16, tmp_path / "nowhere")
