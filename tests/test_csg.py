"""Stage 02: the grammar against GenEval 2's public lines, hand-written prompts and the tiny world; sampling; the command line."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import world
from conftest import ROOT

from common import UserError, load_stage, read_jsonl

TINY = ROOT / "tests/tiny"
csg = load_stage(ROOT / "02_build_csg.py")
TINY_LEXICON = csg.load_lexicon(str(TINY / "lexicon.json"))
GENEVAL2_DEV = ROOT.parent / "shared/data/geneval2_dev.jsonl"  # CC BY-NC: not part of this repository


def parse(prompt: str, lexicon: dict = csg.GENEVAL2) -> dict:
    return csg.parse(prompt, lexicon)


def check_graph(row: dict) -> None:
    """What must hold for every line of atoms.jsonl, whatever the prompt."""
    graph, n = row["csg"], len(row["csg"]["nodes"])
    assert len(graph["atoms"]) == len(row["vqa_list"]) == len(row["skills"])
    assert [a["kind"] for a in graph["atoms"]] == row["skills"]
    assert [node["id"] for node in graph["nodes"]] == list(range(n))
    assert sum(s in ("position", "verb") for s in row["skills"]) == len(graph["edges"])
    assert row["skills"].count("attribute") == sum(len(node["attributes"]) for node in graph["nodes"])
    object_of = {a["nodes"][0]: k for k, a in enumerate(graph["atoms"]) if a["kind"] == "object"}
    assert sorted(object_of) == list(range(n)), "every node has one object atom"
    for atom, (question, answer) in zip(graph["atoms"], row["vqa_list"], strict=True):
        expected = [] if atom["kind"] == "object" else [object_of[i] for i in atom["nodes"]]
        assert atom["depends_on"] == expected
        assert answer == (
            csg.NUMBERS[graph["nodes"][atom["nodes"][0]]["count"] - 1] if atom["kind"] == "count" else "Yes"
        )
        assert question.endswith("?")


# ================================================================ the grammar


def test_geneval2_is_rebuilt_from_the_prompt_alone():
    if not GENEVAL2_DEV.exists():
        pytest.skip("GenEval 2's lines are not beside the repository")
    rows = read_jsonl(GENEVAL2_DEV)
    for row in rows:
        built = parse(row["prompt"])
        for key in ("vqa_list", "skills", "atom_count"):
            assert built[key] == row[key], row["prompt"]
        check_graph(built)
    assert len(rows) == 300


def test_graph_of_a_chain():
    row = parse("a sheep chasing two brown cows to the left of an umbrella")
    assert row["csg"]["nodes"] == [
        {"id": 0, "object": "sheep", "count": 1, "attributes": []},
        {"id": 1, "object": "cow", "count": 2, "attributes": ["brown"]},
        {"id": 2, "object": "umbrella", "count": 1, "attributes": []},
    ]
    assert row["csg"]["edges"] == [
        {"subject": 0, "relation": "chasing", "object": 1, "kind": "verb"},
        {"subject": 1, "relation": "to the left of", "object": 2, "kind": "position"},
    ]
    assert row["vqa_list"] == [
        ["How many sheeps are in the image?", "one"],
        ["Are there any sheeps in the image?", "Yes"],
        ["Is the sheep chasing the cows?", "Yes"],
        ["How many cows are in the image?", "two"],
        ["Are the cows brown?", "Yes"],
        ["Are there any cows in the image?", "Yes"],
        ["Are the cows to the left of the umbrella?", "Yes"],
        ["How many umbrellas are in the image?", "one"],
        ["Are there any umbrellas in the image?", "Yes"],
    ]
    assert row["skills"] == "count object verb count attribute object position count object".split()
    assert [a["depends_on"] for a in row["csg"]["atoms"]] == [[1], [], [1, 5], [5], [5], [], [5, 8], [8], []]
    assert [a["nodes"] for a in row["csg"]["atoms"]] == [[0], [0], [0, 1], [1], [1], [1], [1, 2], [2], [2]]
    assert row["atom_count"] == 7, "two articles are asked and not counted"


# prompt -> (count, attributes, object) of its nodes; (relation, kind) of its edges
FORMS = {
    "a cat": ([(1, "", "cat")], []),
    "one cat": ([(1, "", "cat")], []),
    "ten Sparkling  boxes.": ([(10, "sparkling", "box")], []),
    "a cat and an elephant": ([(1, "", "cat"), (1, "", "elephant")], []),
    "a cat, a dog, and three pigs": ([(1, "", "cat"), (1, "", "dog"), (3, "", "pig")], []),
    "a cat , and two dogs behind a red bus": (
        [(1, "", "cat"), (2, "", "dog"), (1, "red", "bus")],
        [("behind", "position")],
    ),
    "a cat on top of a dog, and a pig": ([(1, "", "cat"), (1, "", "dog"), (1, "", "pig")], [("on top of", "position")]),
    "two small-eared foxes": None,  # an unknown attribute
    "eight wooden men in front of nine striped berries": (
        [(8, "wooden", "man"), (9, "striped", "berry")],
        [("in front of", "position")],
    ),
    "a red striped cookie under four movies": (
        [(1, "red striped", "cookie"), (4, "", "movie")],
        [("under", "position")],
    ),
    "two dogs riding a bike": ([(2, "", "dog"), (1, "", "bike")], [("riding", "verb")]),
    "a cat sitting on top of a glass": ([(1, "", "cat"), (1, "", "glass")], [("sitting on top of", "verb")]),
    "a red building near a king": ([(1, "red", "building"), (1, "", "king")], [("near", "position")]),
    "a dog playing with two sheep": ([(1, "", "dog"), (2, "", "sheep")], [("playing with", "verb")]),
}


@pytest.mark.parametrize("prompt", [p for p, graph in FORMS.items() if graph])
def test_forms(prompt: str):
    row = parse(prompt)
    nodes, edges = FORMS[prompt]
    assert [(n["count"], " ".join(n["attributes"]), n["object"]) for n in row["csg"]["nodes"]] == nodes
    assert [(e["relation"], e["kind"]) for e in row["csg"]["edges"]] == edges
    check_graph(row)


def test_article_is_not_an_atom_but_one_is():
    assert parse("a cat")["atom_count"] == 1 and parse("one cat")["atom_count"] == 2
    assert parse("a cat")["vqa_list"] == parse("one cat")["vqa_list"]


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("", "no atoms"),
        ("  .", "no atoms"),
        ("cats", "starts with a count"),
        ("the cat under a dog", "starts with a count"),
        ("two cat", "not a plural"),
        ("a cats", "not a singular"),
        ("two small-eared foxes", "small-eared"),
        ("a picture of two cats", "no \"and\", position or verb"),
        ("a cat and a black cat", "twice"),
        ("a cat and", "noun"),
        ("a", "noun"),
        ("a cat behind", "noun"),
        ("a cat? and a dog", "noun"),
        ("an a", "no \"and\", position or verb"),
        ("a, b", "noun"),
    ],
)  # fmt: skip
def test_reasons(prompt: str, reason: str):
    with pytest.raises(csg.NoGraph, match=".") as e:
        parse(prompt)
    assert reason in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize(
    "noun", [*csg.GENEVAL2["nouns"], *csg.IRREGULAR, *csg.ENDS_IN_IE, "box", "dish", "city", "vase", "house"]
)
def test_plural_and_back(noun: str):
    expected = csg.plural(noun)
    assert csg.singular(expected) == noun
    assert expected != noun and parse(f"two {expected}")["csg"]["nodes"][0]["object"] == noun


def test_lexicon_names_what_the_grammar_cannot_know():
    with pytest.raises(csg.NoGraph):
        parse("two fluffy traffic lights waving at a cat")
    lexicon = csg.GENEVAL2 | {"nouns": ["traffic light", "cat"], "attributes": ["fluffy"]}
    row = parse("two fluffy traffic lights waving at a cat", lexicon)
    assert row["csg"]["nodes"][0] == {"id": 0, "object": "traffic light", "count": 2, "attributes": ["fluffy"]}
    assert parse("a red traffic light", lexicon)["vqa_list"][0][0] == "How many traffic lights are in the image?"


def test_random_words_are_parsed_or_rejected():
    rng = random.Random(1)
    groups = ["a cat", "an", "two red boxes", "ten", "three dogs", "one", "a glass", "blue", "sheep", "of"]
    joints = ["and", ",", ", and", "under", "riding", "to the left of", "the", "playing with", ""]
    letters = "ab ,.?-'\"\\(){}\n\tÄß字\u2028\x00 a two cats"
    parsed = 0
    for i in range(2000):
        size = rng.randrange(1, 6)
        words = [rng.choice(part) for _ in range(size) for part in (groups, joints)]
        text = " ".join(words[:-1]) if i % 2 else "".join(rng.choices(letters, k=4 * size))
        try:
            check_graph(parse(text))
            parsed += 1
        except csg.NoGraph as e:
            assert str(e)
    assert 50 < parsed < 1000, parsed


# ================================================================ the tiny world


def test_tiny_world_asks_the_same_questions():
    rng = random.Random(3)
    scenes = world.held_out_prompts() + [world.random_scene(rng) for _ in range(200)]
    for scene in scenes:
        row = parse(str(scene), TINY_LEXICON)
        assert row["vqa_list"] == world.questions(scene), str(scene)
        check_graph(row)
    assert len(scenes) == 560


def test_heldout_file_is_the_worlds():
    rows = read_jsonl(TINY / "heldout.jsonl")
    assert sorted(r["prompt"] for r in rows) == sorted(map(str, world.held_out_prompts()))
    for row in rows:
        built = parse(row["prompt"], TINY_LEXICON)
        assert {k: built[k] for k in ("vqa_list", "skills", "atom_count")} | {"prompt": row["prompt"]} == row
    with_side = sum("position" in r["skills"] for r in rows[:90])
    assert 60 <= with_side <= 84, "its first lines are a fair sample (72 expected, standard deviation 3.3)"


def test_tiny_prompts_are_training_prompts():
    prompts = csg.read_prompts(str(TINY / "prompts.txt"))
    assert len(set(map(csg.normalise, prompts))) == len(prompts) == 128
    assert not set(map(csg.normalise, prompts)) & {csg.normalise(str(s)) for s in world.held_out_prompts()}
    for prompt in prompts:
        parse(prompt, TINY_LEXICON)


def test_tiny_lexicon_draws_as_the_world():
    draws, n = random.Random(0), 4000
    prompts = [csg.draw_prompt(TINY_LEXICON, draws) for _ in range(n)]
    scenes = [str(world.random_scene(draws)) for _ in range(n)]
    words = {w for p in prompts for w in p.split()}
    assert words == {w for p in scenes for w in p.split()}
    for (
        word
    ) in words:  # held-out pairs tilt the world by up to 1%; a difference of frequencies has a deviation under 1.2%
        a, b = (sum(word in p.split() for p in ps) / n for ps in (prompts, scenes))
        assert abs(a - b) < 0.05, (word, a, b)


# ================================================================ sampling


@pytest.mark.parametrize("lexicon", [csg.GENEVAL2, TINY_LEXICON], ids=["geneval2", "tiny"])
def test_sampling_is_deterministic_distinct_and_keeps_clear(lexicon: dict):
    first = csg.sample_prompts(100, lexicon, 0, {})
    assert first == csg.sample_prompts(100, lexicon, 0, {})
    assert first != csg.sample_prompts(100, lexicon, 1, {})
    assert len(set(first)) == 100
    excluded = {csg.normalise(p): "x" for p in first}
    second = csg.sample_prompts(100, lexicon, 0, excluded)
    assert not {csg.normalise(p) for p in second} & set(excluded)


def test_sampled_atomicity_is_even_and_order_free():
    counts = [parse(p)["atom_count"] for p in csg.sample_prompts(400, csg.GENEVAL2, 0, {})]
    assert set(counts) == set(range(3, 11))
    assert all(25 <= counts.count(k) <= 80 for k in range(3, 11)), "50 each, standard deviation 6.6"


def test_the_tiny_world_is_exhausted_exactly():
    held_out = {csg.normalise(str(s)): "x" for s in world.held_out_prompts()}
    singles, pairs = 27, 27 * 18 - 72
    assert len(csg.sample_prompts(singles + 5 * pairs, TINY_LEXICON, 0, held_out)) == singles + 5 * pairs
    with pytest.raises(UserError, match="no more prompts"):
        csg.sample_prompts(singles + 5 * pairs + 1, TINY_LEXICON, 0, held_out)


def test_normalise():
    same = ["A cat,  and AN elephant.", "a cat and a elephant", " a CAT, and\tan elephant "]
    assert len({csg.normalise(p) for p in same}) == 1
    assert csg.normalise("a cat and an elephant") != csg.normalise("one cat and an elephant")


@pytest.mark.parametrize(
    "change",
    [
        {"nouns": []},
        {"nouns": ["circle"]},
        {"nouns": 3},
        {"nouns": ["Big Circle", "square", "disc"]},
        {"attributes": []},
        {"counts": {"eleven": 1}},
        {"counts": {"a": "often"}},
        {"forms": {"G X G": 1}},
        {"forms": {}},
        {"forms": ["G"]},
        {"p_attribute": "x"},
        {"atomicity": 3},
        {"verbs": ["chasing"], "p_verb": 1.0},
        {"more": 1},
    ],
    ids=str,
)
def test_bad_lexicon(tmp_path: Path, change: dict):
    path = tmp_path / "lexicon.json"
    path.write_text(json.dumps(TINY_LEXICON | change))
    with pytest.raises(UserError, match="--lexicon .*lexicon.json: ") as e:
        csg.load_lexicon(str(path))
    assert "\n" not in str(e.value)


# ================================================================ the command line


def start(*args: object) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "02_build_csg.py"), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, cwd="/")


@pytest.fixture
def run(run_stage):
    """The stage in this process: its output, or with code=2 its error line."""

    def run(*args: object, code: int | None = None) -> str:
        out, err = run_stage("02_build_csg.py", csg.main, *args, code=code)
        if code:
            assert err.startswith("error: ") and err.count("\n") == 1, err
        return err if code else out

    return run


def test_script_starts(tmp_path: Path):
    good = start("--run", tmp_path / "run", "--sample", 3)
    assert good.returncode == 0 and "3 prompts" in good.stdout, good.stderr
    bad = start("--run", tmp_path / "other", "--preset", "flux2-dev")
    assert bad.returncode == 2 and bad.stderr.startswith("error: give --prompts") and bad.stderr.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["run"], "nothing is written"


def test_command_line(run, tmp_path: Path):
    """Sample, run again, change a setting, parse a file with prompts to reject."""
    runs, heldout = tmp_path / "runs", TINY / "heldout.jsonl"
    sample = ("--run", runs / "a", "--sample", 40, "--exclude", heldout)
    assert "40 prompts" in run(*sample)
    assert sorted(p.name for p in (runs / "a").iterdir()) == ["atoms.jsonl", "atoms.settings.json"]
    rows = read_jsonl(runs / "a/atoms.jsonl")
    assert [r["id"] for r in rows] == list(range(40))
    assert not {r["prompt"] for r in rows} & {r["prompt"] for r in read_jsonl(heldout)}
    for row in rows:
        check_graph(row)

    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in (runs / "a").iterdir()}
    assert "is done" in run(*sample)
    assert "--seed 0, not 1" in run(*sample, "--seed", 1, code=2)
    assert before == {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in (runs / "a").iterdir()}

    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red circle\n\nan unheard-of thing\ntwo blue squares\nthree green triangles\n")
    exclude = tmp_path / "exclude.txt"
    exclude.write_text("Two  blue squares.\n")
    out = run("--run", runs / "b", "--prompts", prompts, "--exclude", exclude)
    assert "2 prompts" in out and "2 rejected" in out and "unheard-of" in out
    assert [r["prompt"] for r in read_jsonl(runs / "b/atoms.jsonl")] == ["a red circle", "three green triangles"]
    reasons = read_jsonl(runs / "b/rejected.jsonl")
    assert reasons[1] == {"prompt": "two blue squares", "reason": "is in exclude.txt (--exclude)"}
    prompts.write_text("a blue circle\n")  # another prompt set under the same name
    assert "--prompts prompts.txt (sha256" in run(
        "--run", runs / "b", "--prompts", prompts, "--exclude", exclude, code=2
    )


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("bad.jsonl", '{"prompt": "a cat"}\n{"prompt": \n', "bad.jsonl:2: not JSON"),
        ("bad.jsonl", '{"prompt": "a cat"}\n[1]\n', "bad.jsonl:2: must be a JSON object"),
        ("bad.jsonl", '{"text": "a cat"}\n', 'not every line has a "prompt"'),
        ("empty.jsonl", "\n", "empty.jsonl: is empty"),
        ("empty.txt", " \n", "empty.txt: is empty"),
        ("bytes.txt", b"\xff\xfe", "bytes.txt: cannot be read"),
        ("none.txt", "hello world\n", "no prompt is left of 1; 'hello world': starts with"),
        ("blank.jsonl", '{"prompt": ""}\n', "no atoms"),
        ("missing.txt", None, "missing.txt: cannot be read: No such file"),
    ],
)
def test_bad_prompts(run, tmp_path: Path, name: str, content: str | bytes | None, says: str):
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert says in run("--run", tmp_path / "run", "--prompts", tmp_path / name, code=2)
    assert not (tmp_path / "run").exists(), "nothing is written"


def test_bad_settings(run, tmp_path: Path):
    (tmp_path / "file").write_text("")
    assert "cannot be written" in run("--run", tmp_path / "file/run", "--sample", 2, code=2)
    assert "--sample 0: must be at least 1" in run("--run", tmp_path / "run", "--sample", 0, code=2)
    (tmp_path / "own").mkdir()
    (tmp_path / "own/atoms.jsonl").write_text('{"prompt": "mine"}\n')
    assert "exists without atoms.settings.json" in run("--run", tmp_path / "own", "--sample", 2, code=2)
    assert (tmp_path / "own/atoms.jsonl").read_text() == '{"prompt": "mine"}\n'
    assert not (tmp_path / "run").exists()
