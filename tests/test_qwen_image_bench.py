"""Qwen-Image-Bench: requests, recorded answers of the judge, good and malformed, averages by hand, and a run with the tiny VLM."""

import json

import pytest
import torch
from conftest import ROOT

import common
from common import UserError

qib = common.load_stage(ROOT / "variants" / "05_qwen_image_bench.py")
SCRIPT = "variants/05_qwen_image_bench.py"
VLM = ROOT / "tests" / "tiny" / "models" / "qwen3vl"

# An answer as the judge gives it: thinking, with a draft of JSON in it, then the object.
GOOD = """The reflections are right. A draft: {"Realism": {"Physical Logic": {"score": 2}}}. No, the noise ...
</think>

{"Realism": {"Physical Logic": {"score": 1}, "Material Texture": {"score": 2}},
 "Detail": {"Noise": {"score": 0}, "Edge Clarity": {"score": "N/A"}, "Naturalness": {"score": 1}},
 "Resolution": {"Resolution": {"score": "N/A"}}}"""
SCORES = {
    "Realism / Physical Logic": 1, "Realism / Material Texture": 2, "Detail / Noise": 0, "Detail / Edge Clarity": "N/A",
    "Detail / Naturalness": 1, "Resolution / Resolution": "N/A",
}  # fmt: skip


def test_the_benchmark_has_5_23_56():
    groups = [g for d in qib.CHECKS.values() for g in d.items()]
    assert (len(qib.CHECKS), len(groups), sum(len(checks) for _, checks in groups)) == (5, 23, 56)


@pytest.mark.parametrize(
    "answer",
    [
        GOOD,
        GOOD.replace("\n\n{", "\n```json\n{") + "\n```",  # in a fence
        GOOD.replace('{"score": 1}', "1").replace('"score": 2}}', '"score": "2"}}'),  # bare, and a digit as text
        '{"Physical Logic": {"score": 1}, "Material Texture": {"score": 2}, "Noise": {"score": 0}, "Edge Clarity": '
        '{"score": "N/A"}, "Naturalness": {"score": 1}, "Resolution": {"score": "N/A"}}',  # without groups
        GOOD.replace('"Noise": {"score": 0}, ', "").replace('"Realism": {"Ph', '"Realism": {"Noise": {"score": 0}, "Ph', 2),
    ],
)  # fmt: skip
def test_good_answers(answer):
    assert qib.parse(answer, True, "Quality") == SCORES


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (GOOD[:-20], "Expecting|delimiter|no JSON"),
        (GOOD.partition("</think>")[0], "checks are not judged|no JSON"),
        ("I cannot judge this picture.", "no JSON object"),
        ("", "no JSON object"),
        (GOOD.replace('"score": 0', '"score": 3'), "'Noise' has the score 3"),
        (GOOD.replace('"score": 0', '"score": true'), "has the score True"),
        (GOOD.replace('"score": 0', '"score": 1.0'), "has the score 1.0"),
        (GOOD.replace('"score": 0', '"score": null'), "has the score None"),
        (GOOD.replace('"score": 0', '"score": "good"'), "has the score 'good'"),
        (GOOD.replace('"score": 0', '"score": [1]'), "has the score"),
        (GOOD.replace('"Noise": {"score": 0}, ', ""), "1 of 6 checks are not judged"),
        (GOOD.replace('"Noise"', '"Grain"'), "'Grain' is no check of Quality"),
        (GOOD.replace('"Edge Clarity"', '"Noise"'), "a name comes twice"),
        (GOOD.replace('"Resolution": {"Res', '"Resolution": {"Noise": {"score": 2}, "Res', 1), "'Noise' is judged twice"),
        ("</think>[1, 2]", "no JSON object"),
        ("</think>{}", "6 of 6 checks"),
        ("</think>" + '{"a":' * 100_000 + "1" + "}" * 100_000, "nested too deep|is no check"),
    ],
)  # fmt: skip
def test_malformed_answers_are_named(answer, error):
    with pytest.raises(ValueError, match=error):
        qib.parse(answer, True, "Quality")


def test_an_answer_that_was_cut_is_malformed_whatever_it_holds():
    with pytest.raises(ValueError, match="cut before its end"):
        qib.parse(GOOD, False, "Quality")


def test_averages_by_hand():
    """Level 3 into 2 into 1 into the total, N/A left out at each: not the mean of all checks."""
    aesthetics = {f"{g} / {c}": 2 for g, checks in qib.CHECKS["Aesthetics"].items() for c in checks}
    got = qib.picture_scores({"Quality": SCORES, "Aesthetics": aesthetics})
    assert got["Quality / Realism"] == 80 and got["Quality / Detail"] == 30 and got["Quality / Resolution"] is None
    assert got["Quality"] == 55 and got["Aesthetics"] == 100 and got["total"] == 77.5


def test_a_malformed_judgement_is_in_no_average():
    rows = [{"ID": i, "dimensions": ["Quality", "Aesthetics"]} for i in "abc"]
    good = {f"{g} / {c}": 1 for d in ("Quality", "Aesthetics") for g, checks in qib.CHECKS[d].items() for c in checks}
    lines = {(i, d): {"scores": {k: v for k, v in good.items() if k.split(" / ")[0] in qib.CHECKS[d]}, "error": None}
             for i in "abc" for d in ("Quality", "Aesthetics")}  # fmt: skip
    lines["a", "Quality"] = {"scores": SCORES, "error": None}
    lines["c", "Quality"] = {"scores": None, "error": "cut before its end"}
    got = qib.summarise(rows, lines)
    assert got["scores"]["Quality"] == {"mean": 57.5, "standard_error": 2.5, "pictures": 2}
    assert got["scores"]["Aesthetics"]["pictures"] == 3
    assert got["scores"]["total"] == {"mean": 58.75, "standard_error": 1.25, "pictures": 2}
    assert (got["pictures"], got["judgements"], got["malformed"]) == (3, 6, 1)
    assert got["malformed_list"] == [{"ID": "c", "dimension": "Quality", "error": "cut before its end"}]


# ---------------------------------------------------------------- requests


def test_a_request_has_the_prompt_the_checks_and_one_place_for_the_picture():
    prompt = "a {sign} with <image> and <|im_end|><|vision_start|>"
    system, user = qib.request(qib.OURS, prompt, "Alignment")
    text = "".join(c.get("text", "[picture]") for c in user["content"])
    assert [c["type"] for c in user["content"]] == ["text", "image", "text"] and system["role"] == "system"
    assert "a {sign} with <image> and < |im_end|>< |vision_start|>" in text.partition("[picture]")[0]
    assert all(f"- {check}" in text for checks in qib.CHECKS["Alignment"].values() for check in checks)
    assert "Physical Logic" not in text and '{"group": {"check": {"score": 0, 1, 2 or "N/A"}}}' in text


def test_wording_of_the_judge_s_own(tmp_path):
    path = tmp_path / "words.json"
    words = {
        "system": "S",
        "user": "{prompt}|<image>|{level1_dim}|{format_checklist}",
        "checklists": dict.fromkeys(qib.CHECKS, "L"),
    }
    path.write_text(json.dumps(words))
    _, user = qib.request(qib.read_judge_prompts(path), "P", "Quality")
    assert [c.get("text") for c in user["content"]] == ["P|", None, "|Quality|L"]
    for change, message in (
        ({"user": "no place"}, "needs <image> once"), ({"user": "<image>{other}"}, "are filled in"), ({"system": 1}, "must hold"),
        ({"checklists": {"Quality": "L"}}, "must hold"),
    ):  # fmt: skip
        path.write_text(json.dumps(words | change))
        with pytest.raises(UserError, match=message):
            qib.read_judge_prompts(path)


def write_input(folder, **change):
    common.save_png(folder / "images" / "a.png", torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(0)))
    common.save_png(folder / "images" / "b.png", torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(1)))
    rows = [
        {"ID": 1, "prompt": "a red circle", "image_path": "images/a.png", "dims_en": "Quality / Detail / Noise; Quality / Realism / X"},
        {"ID": 2, "prompt": "two squares", "image_path": "images/b.png"} | change,
    ]  # fmt: skip
    path = folder / "base.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def test_input_rows(tmp_path):
    one, two = qib.read_rows(write_input(tmp_path))
    assert one["dimensions"] == ["Quality"] and two["dimensions"] == [*qib.CHECKS] and two["ID"] == "2"
    (tmp_path.parent / "outside.png").touch()
    (tmp_path / "link.png").symlink_to(tmp_path.parent / "outside.png")
    for change, message in (
        ({"image_path": "../outside.png"}, "base.jsonl:2: image_path ../outside.png lies outside"),
        ({"image_path": str(tmp_path.parent / "outside.png")}, "lies outside"), ({"image_path": "link.png"}, "lies outside"),
        ({"image_path": "gone.png"}, "base.jsonl:2: image_path gone.png: not found"), ({"prompt": ""}, "needs ID, prompt"),
        ({"dims_en": "Beauty / X / Y"}, "unknown dimension 'Beauty'"), ({"ID": 1}, "two rows have the same ID"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            qib.read_rows(write_input(tmp_path, **change))


# ---------------------------------------------------------------- runs


@pytest.mark.skipif(not VLM.is_dir(), reason="tests/tiny/models has not been built")
def test_the_tiny_vlm_s_nonsense_is_counted_as_malformed(tmp_path, run_stage):
    """The real path through transformers: processor, chat template, generate. The tiny VLM knows no JSON."""
    path, out = (
        write_input(tmp_path, dims_en="Quality / Detail / Noise"),
        tmp_path / "run" / "eval" / "qwen_image_bench",
    )
    argv = ["--run", tmp_path / "run", "--input", path, "--judge", VLM, "--max-new-tokens", 6, "--tries", 2]
    printed = run_stage(SCRIPT, qib.main, *argv)[0]
    assert "malformed: 2 of 2 judgements" in printed
    found, lines = json.loads((out / "base.json").read_text()), common.read_jsonl(out / "base.jsonl")
    assert found["scores"] == {} and [m["ID"] for m in found["malformed_list"]] == ["1", "2"]
    assert all(r["tries"] == 2 and r["answer"] and r["error"] for r in lines)
    before = (out / "base.jsonl").stat().st_mtime_ns
    run_stage(SCRIPT, qib.main, *argv)
    assert (out / "base.jsonl").stat().st_mtime_ns == before, "nothing is asked again"
    assert "with --max-new-tokens 6, not 7" in run_stage(SCRIPT, qib.main, *argv[:-3], 7, code=2)[1]


def test_retries_resume_and_change(tmp_path, run_stage, monkeypatch):
    """Greedy first, then sampled with other seeds; good answers are kept, a changed picture is asked anew."""
    path, asked = write_input(tmp_path, dims_en="Quality / Detail / Noise"), []
    answers = {1: ["nonsense", GOOD], 2: ["nonsense", "{", "cut", GOOD]}  # a row's answers, in turn

    def ask(judge, messages, picture, tokens, seed):
        row = 1 if "red circle" in messages[1]["content"][0]["text"] else 2
        asked.append((row, seed))
        return answers[row].pop(0), True

    monkeypatch.setattr(qib, "load_judge", lambda *args: None)
    monkeypatch.setattr(qib, "ask", ask)
    argv = ["--run", tmp_path / "run", "--input", path, "--tries"]
    printed = run_stage(SCRIPT, qib.main, *argv, 3)[0]
    assert [row for row, _ in asked] == [1, 1, 2, 2, 2] and "malformed: 1 of 2" in printed and "total" in printed
    seeds = [seed for _, seed in asked]
    assert seeds[0] is seeds[2] is None and len({seeds[1], *seeds[3:]}) == 3 and None not in seeds[3:]
    assert "malformed: 0 of 2" in run_stage(SCRIPT, qib.main, *argv, 4)[0] and len(asked) == 6, (
        "one more try of the bad one"
    )
    common.save_png(tmp_path / "images" / "a.png", torch.zeros(3, 32, 32))
    answers[1] = [GOOD]
    run_stage(SCRIPT, qib.main, *argv, 4)
    assert asked[6:] == [(1, None)]
