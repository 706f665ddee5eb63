"""report.html: what is in the file, and what it does in a headless Chromium."""

import base64
import hashlib
import json
import re
from pathlib import Path

import browser
import numpy as np
import pytest
import torch
import world
from conftest import ROOT

import common

ev = common.load_stage(ROOT / "05_eval.py")
TEMPLATE = ROOT / "docs" / "report_template.html"
ATTACK = '</script><script>document.title = "broken"</script><img src=x onerror=alert(1)> & "quoted" '


def synthetic(n: int, *, lora: bool = True, oracle: bool = True, maps: bool = True) -> tuple[dict, dict]:
    """n prompts of the tiny world with random scores and maps -> prompts, records."""
    rng = np.random.default_rng(0)
    prompts, records = {}, {}
    for row, scene in enumerate(world.held_out_prompts()[:n]):
        vqa = world.questions(scene)
        skills = ["count", "attribute", "object", "position", "count", "attribute", "object"]
        skills = skills if len(vqa) == 7 else skills[:3] * 2
        prompts[row] = {"prompt": str(scene), "vqa_list": vqa, "skills": skills, "atom_count": len(vqa)}
        for system in ("base", "lora") if lora else ("base",):
            s = rng.random(len(vqa)).round(3).tolist()
            records[system, row, 0] = {"scores": s, "oracle": [v > 0.4 for v in s] if oracle else None}
            m = torch.rand(len(vqa), 8, 8, generator=torch.Generator().manual_seed(row))
            records[system, row, 0]["maps"] = ev.encode_maps(m) if maps else None
    return prompts, records


def make_page(run: Path, prompts: dict, records: dict, size: int = 32) -> tuple[Path, dict]:
    """The page as a file, and the data that is in it."""
    folders = {s: run / "eval" / "images" / s for s in dict.fromkeys(key[0] for key in records)}
    for system, row, i in records:
        common.save_png(ev.picture_path(folders[system], row, i), torch.rand(3, size, size))
    facts = dict(prompts=len(prompts), images_per_prompt=1, prompts_trained_on=0, steps=8, guidance=4.0, seed=0)
    facts |= dict(model="some/model", vlm="some/vlm", lora_folder="lora/round_0001", images=None)
    text = ev.page(run, folders, prompts, records, facts | ev.summarise(prompts, records, [*folders], 1))
    path = run / "report.html"
    path.write_text(text)
    return path, json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])


# ---------------------------------------------------------------- the file


def test_only_the_page_s_own_script_may_run():
    text = TEMPLATE.read_text()
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text, f"the script has changed: put sha256-{digest} into the policy"
    assert "default-src 'none'" in text and text.count("/*DATA*/") == 1
    assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|eval\(", script), "texts must not become markup"


def test_the_page_is_self_contained_and_texts_cannot_end_the_data(tmp_path):
    prompts, records = synthetic(80)
    for line in prompts.values():
        line["prompt"] = ATTACK + line["prompt"]
        line["vqa_list"] = [[f"<b>{q}", a + "<i>"] for q, a in line["vqa_list"]]
    path, data = make_page(tmp_path, prompts, records)
    text = path.read_text()
    assert [p["prompt"] for p in data["prompts"]] == [prompts[p["row"]]["prompt"] for p in data["prompts"]]
    assert text.count("<script") == 2 and text.count("</script>") == 2
    outside = re.sub(r'base64,[^"]*|xmlns|http://www\.w3\.org/2000/svg', "", text)
    assert not re.search(r"https?://|@import|url\(|<link|<iframe", outside)
    assert sum(p["shown"] for p in data["prompts"]) == ev.SHOWN + ev.CHANGED
    assert all(p["shown"] for p in data["prompts"][: ev.SHOWN]), "the first are the random ones"
    assert all(("picture" in s) == p["shown"] for p in data["prompts"] for s in p["systems"].values())
    assert len(base64.b64decode(data["prompts"][0]["systems"]["base"]["maps"]["bytes"][0])) == 64


def test_large_pictures_are_made_smaller(tmp_path):
    path, data = make_page(tmp_path, *synthetic(3, lora=False, oracle=False), size=1024)
    pictures = [p["systems"]["base"]["picture"] for p in data["prompts"]]
    assert all(p["width"] == 320 and p["src"].startswith("data:image/jpeg;base64,") for p in pictures)
    # noise is the worst case; at this size the largest page, 72 prompts of two systems, stays under 10 MB
    assert max(len(p["src"]) for p in pictures) * 2 * (ev.SHOWN + ev.CHANGED) < 10e6


def test_the_prompts_with_pictures_are_random_first_then_the_extremes():
    prompts, records = synthetic(100)
    shown, changed = ev.pick(prompts, records)
    change = {
        r: abs(np.mean(records["lora", r, 0]["oracle"]) - np.mean(records["base", r, 0]["oracle"])) for r in prompts
    }
    assert len(shown) == ev.SHOWN and len(changed) == ev.CHANGED and not set(shown) & set(changed)
    assert min(change[r] for r in changed) >= max(change[r] for r in set(prompts) - set(shown) - set(changed))
    same = {(s, r, i): records["base", r, i] for s, r, i in records}
    assert ev.pick(prompts, same) == (shown, []), "the random ones do not depend on what came out"


def test_maps_keep_their_shape_a_byte_a_location():
    maps = torch.tensor([[[0.0, 1.0], [2.0, 1.0]]])
    assert base64.b64decode(ev.encode_maps(maps)["bytes"][0]) == bytes([0, 128, 255, 128])


# ---------------------------------------------------------------- in a browser

needs_browser = pytest.mark.skipif(browser.PROGRAM is None, reason="no chromium or chrome on this machine")
ROWS = "[...document.querySelectorAll('#prompts tbody tr')]"
CARDS = "document.querySelectorAll('#cards > article')"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    prompts, records = synthetic(80)
    prompts[5]["prompt"] = ATTACK + prompts[5]["prompt"]
    prompts[5]["vqa_list"][0][0] = "<b>bold</b>?"
    metrics = [
        {"round": r, "reward": 0.5 + r / 10, "atoms": {"count": None if r == 1 else 0.5, "verb": 0.1 * r}, "grad_norm": 0.1,
         "clip_fraction": 0.0, "ratio_minus_1": 1e-8, "seconds": {"rollout": 1.0, "update": 2.0}}
        for r in range(4)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in metrics))
    common.save_png(folder / "window.png", torch.rand(3, 300, 600))
    return make_page(folder, prompts, records)


@pytest.fixture
def page(made, tmp_path):
    opened = browser.Page(made[0], tmp_path / "profile")
    yield opened
    opened.close()
    assert opened.problems == [], "errors and warnings of the page"
    assert opened.requests == [made[0].resolve().as_uri()], "nothing is fetched"


def column(page: browser.Page, i: int) -> list[str]:
    return page.run(f"{ROWS}.map(r => r.cells[{i}].textContent)")


def choose(page: browser.Page, select: str, value: str) -> None:
    page.run(
        f"(s => {{ s.value = {value!r}; s.dispatchEvent(new Event('change')) }})(document.getElementById({select!r}))"
    )


@needs_browser
def test_the_page_opens_and_shows_all_its_parts(page, made):
    titles = page.run("[...document.querySelectorAll('h2')].map(h => h.textContent)")
    assert titles == ["Prompts", "Metrics", "Training", "Figures of the run"]
    assert page.run(f"{ROWS}.length") == 80 and page.run(f"{CARDS}.length") == 12
    assert page.run("document.querySelectorAll('polyline').length") == 4 + 2 + 2
    assert page.run("[...document.images].every(i => i.complete && i.naturalWidth && i.alt)")
    assert page.run("document.querySelectorAll('.big').length") == 4
    text = page.run("document.body.innerText").lower()
    assert "nan" not in text and "undefined" not in text and "[object" not in text
    assert page.run("document.documentElement.scrollWidth <= innerWidth")


@needs_browser
def test_texts_with_markup_are_shown_as_texts(page):
    assert page.run("document.title") != "broken"
    choose(page, "outcome", "")
    page.run(
        "document.querySelector('.more').click(); while (!document.querySelector('.more').hidden) document.querySelector('.more').click()"
    )
    card = "document.querySelector('article[data-row=\"5\"]')"
    assert page.run(f"{card}.querySelector('h3').textContent").startswith(ATTACK)
    assert page.run(f"{card}.querySelector('tbody button').textContent").startswith("<b>bold</b>?")
    assert page.run(f"{card}.querySelectorAll('script, b').length") == 0


@needs_browser
def test_filters_and_sorting(page, made):
    prompts = made[1]["prompts"]
    choose(page, "skill", "position")
    with_position = [p for p in prompts if "position" in p["skills"]]
    assert column(page, 0) == [p["prompt"] for p in with_position] and 0 < len(with_position) < 80
    assert page.run(f"{ROWS}[0].cells[2].textContent").split()[0] in ("0/1", "1/1"), "the judgement is of that skill"
    assert page.run("document.querySelectorAll('#cards tr.other').length") == 12 * 6
    choose(page, "atoms", "6")
    assert page.run(f"{ROWS}.length") == 0 and page.run(f"{CARDS}.length") == 0
    choose(page, "skill", "")
    assert column(page, 0) == [p["prompt"] for p in prompts if p["atom_count"] == 6]
    choose(page, "atoms", "")
    choose(page, "outcome", "up")
    better = [p for p in prompts if sum(p["systems"]["lora"]["right"]) > sum(p["systems"]["base"]["right"])]
    assert column(page, 0) == [p["prompt"] for p in better]
    assert page.run("document.querySelector('[role=status]').textContent").startswith(f"{len(better)} of 80")
    choose(page, "outcome", "")

    change = [int(v.replace("\u2212", "-")) for v in column(page, 4)]
    for order in (sorted(change, reverse=True), sorted(change)):
        page.run("document.querySelector('[data-sort=change]').click()")
        assert [int(v.replace("\u2212", "-")) for v in column(page, 4)] == order
    assert page.run("document.querySelector('[data-sort=change]').parentNode.ariaSort") == "ascending"
    assert page.run(f"{CARDS}[0].querySelector('h3').textContent") == column(page, 0)[0], "the cards have that order"
    page.run("document.querySelector('[data-sort=prompt]').click()")
    assert column(page, 0) == sorted(column(page, 0))
    page.run("document.querySelector('[data-sort=extreme]').click()")
    assert [abs(int(v.replace("\u2212", "-"))) for v in column(page, 4)] == sorted(map(abs, change), reverse=True)
    page.run("document.querySelector('[data-sort=place]').click()")
    assert column(page, 0) == [p["prompt"] for p in prompts]


@needs_browser
def test_the_keyboard_reaches_a_prompt_and_an_atom_s_map(page, made):
    page.run("document.querySelector('#prompts tbody button').focus()")
    for key in ("ArrowDown", "ArrowDown", "ArrowUp", "End"):
        page.press(key)
    assert page.run("document.activeElement.textContent") == made[1]["prompts"][-1]["prompt"]
    page.press("Enter")
    assert page.run(f"{CARDS}.length") == 80
    assert page.run("document.activeElement.textContent") == made[1]["prompts"][-1]["prompt"], "the card has the focus"
    assert "not on this page" in page.run(f"{CARDS}[79].textContent") or made[1]["prompts"][-1]["shown"]

    hidden = f"[...{CARDS}[0].querySelectorAll('canvas')].map(c => c.hidden)"
    alpha = (
        f"(c => [...c.getContext('2d').getImageData(0, 0, 8, 8).data].filter((v, i) => i % 4 == 3))"
        f"({CARDS}[0].querySelectorAll('canvas')[1])"
    )
    assert page.run(hidden) == [True, True]
    page.run(f"{CARDS}[0].querySelector('tbody button').focus()")
    page.press("ArrowDown")
    assert page.run(hidden) == [False, False]
    levels = base64.b64decode(made[1]["prompts"][0]["systems"]["lora"]["maps"]["bytes"][1])
    assert np.abs(np.array(page.run(alpha)) - 0.82 * (255 - np.array([*levels]))).max() <= 1, (
        "dark where the map is not"
    )
    page.press("Enter")
    page.run("document.activeElement.blur()")
    assert page.run(hidden) == [False, False], "it stays"
    page.run(f"{CARDS}[0].querySelectorAll('tbody button')[1].focus()")
    page.press("Escape")
    assert page.run(hidden) == [True, True]
    page.move("#cards article tbody button", 2)
    assert page.run(hidden) == [False, False], "the mouse over a question"
    page.move("h1")
    assert page.run(hidden) == [True, True]


@needs_browser
def test_a_telephone_and_a_page_of_the_base_alone(tmp_path, made):
    alone, _ = make_page(tmp_path / "run", *synthetic(3, lora=False, oracle=False, maps=False))
    for path, cards in ((made[0], 12), (alone, 3)):
        opened = browser.Page(path, tmp_path / f"profile{cards}", 390, 800)
        assert opened.run("[innerWidth, document.documentElement.scrollWidth]") == [390, 390], "nothing is wider"
        assert opened.run(f"{CARDS}.length") == cards
        opened.run(f"{CARDS}[0].querySelector('tbody button').focus()")  # without maps: nothing to show, no error
        text = opened.run("document.body.innerText")
        assert ("Largest changes" in text) == (cards == 12) and "undefined" not in text
        opened.close()
        assert opened.problems == []
