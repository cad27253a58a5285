"""Multiple-choice questions from held-out Python files, in lm-eval's format: which of four continuations is right?

    python examples/python_questions.py build out/questions               # 2,400 questions, nothing to download
    python examples/evaluate_litgpt.py out/tiny_cpu/final --questions out/questions --answers out/scape.json
    python examples/python_questions.py compare out/adamw.json out/scape.json

The files are those of this machine's standard library that PythonSource holds out, so no model of this project was
trained on them. A question is the text before a place of a file, and what may follow there. Four kinds, 600 of each;
the right answer is at a random place, so chance is 25%:

- indentation: the next line, at its own indentation or at others;
- name: a name of the file, or others of the same length that it also has;
- closing: brackets that close here and what belongs to them, or as many others;
- argument: an argument of a call, or arguments of the file's other calls, of about the same length.

`build` writes a folder that lm-eval takes by --include_path: the task python_questions, a task for each kind, and the
questions as JSON lines. The same Python gives the same questions.
"""

from __future__ import annotations

import argparse
import ast
import io
import itertools
import json
import keyword
import math
import random
import sys
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from python_source import Corpus, read_corpus

from lightning_scape.tools.arguments import count as whole
from lightning_scape.tools.console import ends_quietly

CONTEXT = 96
"""Bytes before the place; with the longest answer they fit into 128."""
LONGEST = 28
"""Bytes of an answer."""
EACH = 600
"""Questions of a kind."""
CHOICES = 4
TASK = "python_questions"


class Question(NamedTuple):
    """What lm-eval asks."""

    kind: str
    file: str
    prompt: str
    choices: list[str]
    answer: int
    """Place of the right one."""


class Place(NamedTuple):
    """Where a question may be asked: the right continuation, and wrong ones to choose from."""

    start: int
    """In the file's text."""
    right: str
    wrong: list[str]


class Source(NamedTuple):
    """A file, taken apart."""

    text: str
    tokens: list[tokenize.TokenInfo]
    starts: list[int]
    """Of its lines, in the text."""

    @classmethod
    def of(cls, text: str) -> Source:
        starts = [0, *itertools.accumulate(map(len, _lines(text)))]
        return cls(text, list(tokenize.generate_tokens(io.StringIO(text).readline)), starts)

    def at(self, place: tuple[int, int]) -> int:
        """A token's place in the text."""
        return self.starts[place[0] - 1] + place[1]


def _lines(text: str) -> list[str]:
    """As Python counts them: ``str.splitlines`` also ends one at a form feed."""
    return list(io.StringIO(text))


# ------------------------------------------------------------------------------------------------- the four kinds


def indentations(source: Source) -> Iterator[Place]:
    """Each line's first word, at other multiples of four."""
    fresh = True
    for token in source.tokens:
        if token.type in (tokenize.NEWLINE, tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT):
            fresh = fresh or token.type == tokenize.NEWLINE
            continue
        column = token.start[1]
        if fresh and token.type == tokenize.NAME and column % 4 == 0 and column <= 16:
            wrong = [" " * other + token.string for other in range(0, 20, 4) if other != column]
            yield Place(source.at((token.start[0], 0)), " " * column + token.string, wrong)
        fresh = False


def names(source: Source) -> Iterator[Place]:
    """A name, and others of its length."""
    found = [t for t in source.tokens if t.type == tokenize.NAME and not keyword.iskeyword(t.string)]
    known = {token.string for token in found}
    for token in found:
        same = sorted(name for name in known if len(name) == len(token.string) > 2 and name != token.string)
        yield Place(source.at(token.start), token.string, same)


def closings(source: Source) -> Iterator[Place]:
    """Brackets that close, up to three signs with the colon or comma behind them, and other signs in their place."""
    for token in source.tokens:
        if token.type != tokenize.OP or token.string not in ")]}":
            continue
        start = source.at(token.start)
        end = start + 1
        while end - start < 3 and source.text[end : end + 1] in (")", "]", "}", ":", ","):
            end += 1
        right = source.text[start:end]
        wrong = {other + rest for other in ")]}:," for rest in (right[1:], *(r * len(right[1:]) for r in ")]}:"))}
        yield Place(start, right, sorted(wrong - {right}))


def arguments(source: Source) -> Iterator[Place]:
    """An argument of a call, up to what ends it, and other calls' arguments."""
    calls = [node for node in ast.walk(ast.parse(source.text)) if isinstance(node, ast.Call)]
    given = [argument for call in calls for argument in call.args if argument.lineno == argument.end_lineno]
    found = []
    lines = _lines(source.text)
    for argument in given:
        line = lines[argument.lineno - 1]
        if line.isascii() and argument.end_col_offset is not None:
            said = line[argument.col_offset : argument.end_col_offset]
            end = line[argument.end_col_offset : argument.end_col_offset + 1]
            if end in (",", ")"):
                found.append((source.at((argument.lineno, argument.col_offset)), said, end))
    for start, said, end in found:
        near = {other + end for _, other, _ in found if other != said and abs(len(other) - len(said)) <= 1}
        yield Place(start, said + end, sorted(near))


KINDS: dict[str, Callable[[Source], Iterator[Place]]] = {
    "indentation": indentations,
    "name": names,
    "closing": closings,
    "argument": arguments,
}


# ------------------------------------------------------------------------------------------------------- building


def held_out(corpus: Corpus) -> dict[str, Source]:
    """The validation files that are text, by name."""
    contents = bytes(corpus.validation.tolist()).split(b"\0")[:-1]
    found = {}
    for name, content in zip(corpus.validation_files, contents, strict=True):
        try:
            found[name] = Source.of(content.decode("ascii").replace("\r\n", "\n"))
        except (UnicodeDecodeError, SyntaxError, tokenize.TokenError):
            continue
    return found


def questions(sources: dict[str, Source], each: int = EACH, seed: int = 0) -> list[Question]:
    """``each`` questions of every kind, spread over the files.

    Raises:
        ValueError: the files do not have so many.
    """
    found: list[Question] = []
    for kind, places in KINDS.items():
        draw = random.Random(f"{kind} {seed}")
        by_file = {name: list(filter(None, map(_fitting, places(source)))) for name, source in sources.items()}
        for mine in by_file.values():
            draw.shuffle(mine)
        taken: list[Question] = []
        while len(taken) < each and any(by_file.values()):
            for name, mine in by_file.items():  # one of each file in turn
                if mine and len(taken) < each:
                    taken.append(_ask(kind, name, sources[name].text, mine.pop(), draw))
        if len(taken) < each:
            raise ValueError(f"`each` must be at most {len(taken)} of {kind}, got {each}. Ask fewer questions.")
        found += taken
    return found


def _fitting(place: Place) -> Place | None:
    """With answers that are short enough; None: there are too few, or too little stands before."""
    wrong = [each for each in place.wrong if len(each) <= LONGEST]
    fits = place.start >= CONTEXT and len(place.right) <= LONGEST and len(wrong) >= CHOICES - 1
    return place._replace(wrong=wrong) if fits else None


def _ask(kind: str, file: str, text: str, place: Place, draw: random.Random) -> Question:
    choices = [place.right, *draw.sample(place.wrong, CHOICES - 1)]
    draw.shuffle(choices)
    return Question(kind, file, text[place.start - CONTEXT : place.start], choices, choices.index(place.right))


def build(folder: Path, each: int = EACH) -> list[Question]:
    """Writes lm-eval's tasks."""
    corpus = read_corpus()
    asked = questions(held_out(corpus), each)
    folder.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        data = folder / f"{kind}.jsonl"
        lines = [json.dumps(question._asdict()) + "\n" for question in asked if question.kind == kind]
        data.write_text("".join(lines))
        (folder / f"{kind}.yaml").write_text(_task(kind, data))
    listed = "".join(f"  - {TASK}_{kind}\n" for kind in KINDS)
    (folder / "group.yaml").write_text(
        f"group: {TASK}\ntask:\n{listed}aggregate_metric_list:\n  - metric: acc\n    weight_by_size: true\n"
    )
    print(f"{len(asked)} questions from {len({q.file for q in asked})} files (corpus {corpus.fingerprint}) in {folder}")
    return asked


def _task(kind: str, data: Path) -> str:
    path = json.dumps(str(data.resolve()))  # YAML, too, whatever is in it
    return (
        f"task: {TASK}_{kind}\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {path}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{prompt}}'\ndoc_to_target: answer\n"
        "doc_to_choice: choices\ntarget_delimiter: ''\nmetric_list:\n  - metric: acc\n    aggregation: mean\n"
        "    higher_is_better: true\n"
    )


# ------------------------------------------------------------------------------------------------------ comparing


def accuracy(right: list[int]) -> tuple[float, float]:
    """The share of answers that are right, and its standard error."""
    share = sum(right) / len(right)
    return share, math.sqrt(share * (1 - share) / len(right))


class Paired(NamedTuple):
    """Two models on the same questions."""

    difference: float
    """Share of right answers of the second, less that of the first."""
    error: float
    """Standard error of the difference."""
    p: float
    """McNemar's test, exact, two-sided: how likely so uneven a split of the questions on which they differ is."""


def paired(first: list[int], second: list[int]) -> Paired:
    """Compares right (1) and wrong (0) answers, question by question.

    Raises:
        ValueError: the lists are not of the same questions.
    """
    if len(first) != len(second):
        raise ValueError(f"Both must have answered the same questions, got {len(first)} and {len(second)}.")
    count = len(first)
    lost = sum(a > b for a, b in zip(first, second, strict=True))
    won = sum(a < b for a, b in zip(first, second, strict=True))
    differing, fewer = lost + won, min(lost, won)
    tail = sum(math.comb(differing, k) for k in range(fewer + 1)) / 2**differing
    error = math.sqrt(max(0.0, differing - (won - lost) ** 2 / count)) / count
    return Paired((won - lost) / count, error, min(1.0, 2 * tail))


def with_all(answers: dict[str, list[int]]) -> dict[str, list[int]]:
    """The answers to each kind, and behind them those to all questions."""
    return {**answers, "all": sum(answers.values(), [])}


def _read(path: Path) -> dict[str, Any]:
    try:
        read: dict[str, Any] = json.loads(path.read_text())
        if read["questions"] and all(read["answers"].values()):
            return read
        why = "none"
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
    raise SystemExit(
        f"{path} must hold answers that `evaluate_litgpt.py --answers` wrote, got {why}. Name such a file."
    )


def compare(paths: list[Path]) -> str:
    """A table: each model's accuracy, and its difference from the first one's."""
    read = [_read(path) for path in paths]
    if len({each["questions"] for each in read}) > 1:
        raise SystemExit("All must have answered the same questions: build them once, and evaluate each model on them.")
    lines = ["| model | kind | right | against the first | McNemar's p |", "|---|---|---|---|---|"]
    for path, each in zip(paths, read, strict=True):
        answers, base = (with_all(of["answers"]) for of in (each, read[0]))
        for kind, right in answers.items():
            share, error = accuracy(right)
            against = paired(base[kind], right)
            cells = ("-", "-")
            if each is not read[0]:
                cells = (f"{100 * against.difference:+.1f} ± {100 * against.error:.1f}", f"{against.p:.2f}")
            lines.append(f"| {path.stem} | {kind} | {share:.1%} ± {100 * error:.1f} | {' | '.join(cells)} |")
    return "\n".join(lines)


@ends_quietly
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    building = commands.add_parser("build", help="write the questions and lm-eval's tasks")
    building.add_argument("folder", type=Path)
    building.add_argument("--each", type=whole, default=EACH, help=f"questions of each kind (default: {EACH})")
    comparing = commands.add_parser("compare", help="answers of several models, paired with those of the first")
    comparing.add_argument("answers", type=Path, nargs="+", help="what evaluate_litgpt.py --answers wrote")
    args = parser.parse_args()
    if args.command == "build":
        try:
            build(args.folder, args.each)
        except (ValueError, OSError) as error:
            parser.error(str(error))
    else:
        print(compare(args.answers))


if __name__ == "__main__":
    sys.exit(main())
