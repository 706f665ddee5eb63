"""Stage 02: prompts -> causal scene graphs (CSG) -> verifiable atoms. CAST, Figure 3; DESIGN 4.

Reads   --prompts FILE (one a line, or JSONL with a "prompt" field such as GenEval 2's), or samples --sample N training
        prompts from the grammar; --lexicon FILE (default: GenEval 2's words).
Writes  RUN/atoms.jsonl            a line a prompt: id, prompt, atom_count, vqa_list, skills as GenEval 2 has them, and csg:
                                   nodes {id, object, count, attributes}, edges {subject, relation, object, kind},
                                   atoms {kind, nodes, depends_on}, one per vqa_list entry and in its order
        RUN/rejected.jsonl         prompts outside of the grammar, each with the reason (only if there are any)
        RUN/atoms.settings.json    what they were made with

    python 02_build_csg.py --preset tiny --run runs/demo --sample 400
    python 02_build_csg.py --preset flux2-dev --run runs/flux2 --sample 2000 --exclude geneval2_data.jsonl

Grammar  PROMPT = GROUP (JOINT GROUP)*    GROUP = COUNT ATTRIBUTE* NOUN    JOINT = "and" | "," | POSITION | VERB
A relation holds between its two neighbours: "a cat under a box behind two dogs" is cat-under-box and box-behind-dogs, and
"a cat, and a box behind two dogs" only the second. Nouns are open-class; so are verbs ("riding", "playing with").

Choices where the paper is silent (it shows the graph, not how it is built):
  1. An atom depends on the object atoms of its nodes: no count, attribute or relation without the object.
  2. "a" is asked as a count of one, but is not in atom_count (GenEval 2). An explicit "one" is.
  3. A noun that is named twice is rejected: "How many cats ...?" would have two right answers.
"""

import argparse
import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

from common import (
    UserError,
    file_id,
    parse_args,
    read_json,
    read_jsonl,
    read_prompts,
    require_same,
    run_main,
    write_settings,
    write_text,
)

NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
COUNTS = {"a": 1, "an": 1, **{word: i for i, word in enumerate(NUMBERS, 1)}}

# GenEval 2's words. The weights of forms and counts and p_attribute are our maximum-likelihood fit to the forms of its
# prompts given their atomicity; with an atomicity drawn evenly from 3..10 they give back its mixture of forms.
ANIMALS = (
    "bear bird cat cow dog elephant flamingo giraffe horse kangaroo koala lion monkey penguin pig rabbit raccoon sheep turtle zebra"
).split()
THINGS = (
    "backpack bagel bicycle candle car chair clock cookie croissant donut flower guitar motorcycle mushroom suitcase toy truck "
    "trumpet umbrella violin"
).split()
GENEVAL2: dict[str, Any] = {
    "nouns": ANIMALS + THINGS,
    "animate": ANIMALS,  # who can do a verb, and to whom
    "attributes": (
        "black blue brown green pink purple red white yellow checkered sparkling spotted striped glass metal plastic stone "
        "wooden"
    ).split(),
    "counts": {"a": 6, "two": 1, "three": 1, "four": 1, "five": 1, "six": 1, "seven": 1},
    "positions": ["to the left of", "to the right of", "in front of", "on top of", "behind", "under"],
    "verbs": ["chasing", "jumping over", "playing with"],
    "forms": {  # G a group, R a relation
        "G": 18, "G and G": 13, "G R G": 14, "G and G and G": 5, "G R G, and G": 14, "G, and G R G": 17, "G R G R G": 19,
    },
    "p_attribute": 0.55,
    "p_verb": 0.1,  # of a relation
    "atomicity": [3, 4, 5, 6, 7, 8, 9, 10],  # drawn evenly; []: as it falls out
}  # fmt: skip

# Understood in prompts beside the lexicon's words, never sampled.
MORE_ATTRIBUTES = [*GENEVAL2["attributes"], *"orange gray grey golden silver leather paper rubber ceramic".split()]
MORE_POSITIONS = [*GENEVAL2["positions"], "above", "below", "beneath", "beside", "next to", "near", "inside", "on"]
OPEN_VERB = r"(?!(k|r|str|spr|sw|w|th|build|paint|ceil|earr|duckl|pudd)ing\b)[a-z]{2,}ing"  # a "ring" is no verb
PREPOSITION = "at|away from|for|from|in|into|off|onto|out of|over|through|to|towards|with"
IRREGULAR = dict(
    man="men", woman="women", child="children", person="people", foot="feet", tooth="teeth", goose="geese", mouse="mice",
    wolf="wolves", knife="knives", leaf="leaves", shelf="shelves", bus="buses", lens="lenses", potato="potatoes",
    tomato="tomatoes",
)  # fmt: skip
INVARIANT = ("sheep", "fish", "deer")
ENDS_IN_IE = "cookie movie zombie pie tie brownie smoothie genie hoodie pixie magpie".split()
NO_NOUN = "and the of is are with to in on behind under above below near".split()
MAX_TRIES = 100_000  # draws in a row without a new prompt: the lexicon has no more


class NotInGrammar(UserError):
    """A prompt that the grammar does not have. Its text is the reason."""


def plural(noun: str) -> str:
    """Plural by rule. GenEval 2 says "sheeps", so ours has it too."""
    if noun in IRREGULAR:
        return IRREGULAR[noun]
    if re.search(r"([sxz]|[cs]h)$", noun):
        return noun + "es"
    return noun[:-1] + "ies" if re.search(r"[^aeiou]y$", noun) else noun + "s"


def singular(noun: str) -> str | None:
    """Singular of a plural by rule; None if it is no plural."""
    if noun in INVARIANT:
        return noun
    if noun in IRREGULAR.values():
        return next(one for one, many in IRREGULAR.items() if many == noun)
    if noun.endswith("ies") and noun[:-1] not in ENDS_IN_IE:
        return noun[:-3] + "y"
    if re.search(r"(ss|x|[cs]h|zz)es$", noun):
        return noun[:-2]
    return noun[:-1] if re.search(r".[^su]s$", noun) and noun not in IRREGULAR else None


def normalise(prompt: str) -> str:
    """Two prompts are the same if these are: without case, extra space, commas, a final dot, and a = an."""
    words = re.sub(r"[\s,]+", " ", prompt.casefold()).strip(" .").split(" ")
    return " ".join("a" if w == "an" else w for w in words)


# ================================================================ prompt -> scene graph -> atoms


def parse_group(words: list[str], count_word: str, lexicon: dict[str, Any]) -> tuple[dict[str, Any], str, str]:
    """ATTRIBUTE* NOUN after its count -> node without id, the noun as the prompt has it, its plural."""
    count, text = COUNTS[count_word], " ".join(words)
    if not words or not all(re.fullmatch(r"[a-z]+(['-][a-z]+)*", w) for w in words) or words[-1] in NO_NOUN:
        raise NotInGrammar(f'"{text}" after "{count_word}" is not a noun with its attributes')
    nouns = lexicon["nouns"] if count == 1 else list(map(plural, lexicon["nouns"]))
    cut = len(words) - 1  # a noun is one word, but for those like "traffic light" that the lexicon has
    cut = next((i for i in range(cut) if " ".join(words[i:]) in nouns), cut)
    noun, attributes = " ".join(words[cut:]), words[:cut]
    if unknown := [w for w in attributes if w not in lexicon["attributes"] + MORE_ATTRIBUTES]:
        raise NotInGrammar(f'"{unknown[0]}" is not a known attribute; a lexicon can name it, or the noun "{text}"')
    name = noun if count == 1 else lexicon["nouns"][nouns.index(noun)] if noun in nouns else singular(noun)
    if name is None or count == 1 and singular(noun) not in (None, noun) and noun not in nouns:
        raise NotInGrammar(f'"{noun}" after "{count_word}" is not a {"singular" if count == 1 else "plural"}')
    return {"object": name, "count": count, "attributes": attributes}, noun, plural(noun) if count == 1 else noun


def split_joint(words: list[str], lexicon: dict[str, Any]) -> tuple[list[str], str, str]:
    """What stands between two counts -> the words of the group, the joint, its kind: "and", "position" or "verb"."""
    position = "|".join(map(re.escape, [*lexicon["positions"], *MORE_POSITIONS]))
    verb = "|".join([*map(re.escape, lexicon["verbs"]), rf"{OPEN_VERB}( ({PREPOSITION}|{position}))?"])
    joints = {"and": ",|,? ?and", "position": position, "verb": verb}
    for i in range(1, len(words)):  # the longest joint first
        for kind, pattern in joints.items():
            if re.fullmatch(pattern, " ".join(words[i:])):
                return words[:i], " ".join(words[i:]), kind
    raise NotInGrammar(f'no "and", position or verb at the end of "{" ".join(words)}"')


def parse(prompt: str, lexicon: dict[str, Any]) -> dict[str, Any]:
    """Prompt -> {"atom_count", "vqa_list", "skills", "csg"} of the contract. Raises NotInGrammar with the reason."""
    words = re.findall(r"[^\s,]+|,", re.sub(r"\.\s*$", "", prompt.lower()))
    starts = [i for i, w in enumerate(words) if w in COUNTS]
    if not words or words[0] not in COUNTS:
        start = f'starts with "{words[0]}"' if words else "is empty: it has no atoms"
        raise NotInGrammar(f"{start}; a prompt starts with a count (a, an, one ... ten)")

    # Left to right: groups begin at the counts, and what ends a group joins it to the next. GenEval 2's order of atoms:
    # of each group its count, attributes, object, and then its relation to the next group.
    nodes, edges, atoms, vqa = [], [], [], []
    relation, kind, the = "", "and", ""

    def add(kind: str, about: list[int], question: str, answer: str = "Yes") -> None:
        atoms.append({"kind": kind, "nodes": about})
        vqa.append([question, answer])

    for i, (start, end) in enumerate(zip(starts, [*starts[1:], len(words)], strict=True)):
        body, joint, joint_kind = words[start + 1 : end], "", "and"
        if end < len(words):
            body, joint, joint_kind = split_joint(body, lexicon)
        node, noun, many = parse_group(body, words[start], lexicon)
        if any(node["object"] == n["object"] for n in nodes):
            raise NotInGrammar(f'names "{node["object"]}" twice: the questions on the two could not be told apart')
        nodes.append({"id": i, **node})
        if kind != "and":
            edges.append({"subject": i - 1, "relation": relation, "object": i, "kind": kind})
            add(kind, [i - 1, i], f"{the} {relation} the {noun}?")
        relation, kind, the = joint, joint_kind, f"{'Is' if node['count'] == 1 else 'Are'} the {noun}"
        add("count", [i], f"How many {many} are in the image?", NUMBERS[node["count"] - 1])
        for attribute in node["attributes"]:
            add("attribute", [i], f"{the} {attribute}?")
        add("object", [i], f"Are there any {many} in the image?")

    objects = {a["nodes"][0]: k for k, a in enumerate(atoms) if a["kind"] == "object"}
    for atom in atoms:
        atom["depends_on"] = [objects[n] for n in atom["nodes"]] if atom["kind"] != "object" else []
    atom_count = len(atoms) - sum(words[s] in ("a", "an") for s in starts)
    csg = {"nodes": nodes, "edges": edges, "atoms": atoms}
    return {"atom_count": atom_count, "vqa_list": vqa, "skills": [a["kind"] for a in atoms], "csg": csg}


# ================================================================ where prompts come from


def draw_prompt(lexicon: dict[str, Any], rng: random.Random) -> str:
    """One prompt of the grammar with the lexicon's weights."""

    def weighted(key: str) -> str:
        return rng.choices(list(lexicon[key]), list(lexicon[key].values()))[0]

    p_verb = lexicon["p_verb"] if lexicon["verbs"] else 0
    slots = ["V" if s == "R" and rng.random() < p_verb else s for s in weighted("forms").replace(",", " ,").split()]
    nouns, words = [], []
    for i, slot in enumerate(slots):
        if slot == "G":
            pool = lexicon["animate" if "V" in slots[max(i - 1, 0) : i + 2] else "nouns"]
            nouns.append(rng.choice([n for n in pool if n not in nouns]))
            words.append(count := weighted("counts"))
            if rng.random() < lexicon["p_attribute"]:
                words.append(rng.choice(lexicon["attributes"]))
            words.append(nouns[-1] if COUNTS[count] == 1 else plural(nouns[-1]))
        else:
            words.append(rng.choice(lexicon[{"R": "positions", "V": "verbs"}[slot]]) if slot in ("R", "V") else slot)
    return " ".join(words).replace(" ,", ",")


def load_lexicon(path: str | None) -> dict[str, Any]:
    """A lexicon file, or GENEVAL2. It is good if prompts can be drawn from it."""
    lexicon = read_json(Path(path)) if path else GENEVAL2
    if not isinstance(lexicon, dict) or set(lexicon) != set(GENEVAL2):
        raise UserError(f"--lexicon {path}: must be a JSON object with exactly the keys {', '.join(GENEVAL2)}")
    try:
        for seed in range(500):
            parse(draw_prompt(lexicon, random.Random(seed)), lexicon)
        list(lexicon["atomicity"])
    except (TypeError, ValueError, LookupError, AttributeError, NotInGrammar) as e:
        raise UserError(f"--lexicon {path}: no prompts can be made of it ({e}); GENEVAL2 in this script is one") from e
    return lexicon


def sample_prompts(n: int, lexicon: dict[str, Any], seed: int, excluded: dict[str, str]) -> list[str]:
    """n different prompts, none of them excluded; the same for the same seed."""
    rng, seen, prompts = random.Random(seed), set(excluded), []
    while len(prompts) < n:
        target = rng.choice(lexicon["atomicity"] or [None])
        for _ in range(MAX_TRIES):
            prompt = draw_prompt(lexicon, rng)
            if normalise(prompt) not in seen and target in (None, parse(prompt, lexicon)["atom_count"]):
                break
        else:
            raise UserError(f"--sample {n}: after {len(prompts)} no more prompts of {target or 'any'} atoms are found")
        seen.add(normalise(prompt))
        prompts.append(prompt)
    return prompts


def build(prompts: list[str], lexicon: dict[str, Any], excluded: dict[str, str]) -> tuple[list[dict], list[dict]]:
    """Prompts -> the lines of atoms.jsonl and of rejected.jsonl."""
    atoms, rejected = [], []
    for prompt in prompts:
        try:
            if normalise(prompt) in excluded:
                raise NotInGrammar(f"is in {excluded[normalise(prompt)]} (--exclude)")
            atoms.append({"id": len(atoms), "prompt": prompt, **parse(prompt, lexicon)})
        except NotInGrammar as e:
            rejected.append({"prompt": prompt, "reason": str(e)})
    return atoms, rejected


def report(atoms: list[dict[str, Any]]) -> None:
    """Prints how many prompts have each atomicity, and how many atoms are of each kind."""
    kinds, atomicity = Counter(k for a in atoms for k in a["skills"]), Counter(a["atom_count"] for a in atoms)
    print(f"{len(atoms)} prompts, {sum(kinds.values())} atoms")
    print("  prompts of an atomicity:", ", ".join(f"{k}: {n}" for k, n in sorted(atomicity.items())))
    print("  atoms of a kind:", ", ".join(f"{k}: {n}" for k, n in kinds.most_common()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompts", metavar="FILE", help="prompts: text, one a line, or .jsonl with a prompt field")
    source.add_argument("--sample", type=int, metavar="N", help="sample N different prompts; --seed is their seed")
    parser.add_argument("--lexicon", metavar="FILE.json", help="words and weights of the grammar; None: GenEval 2's")
    parser.add_argument("--exclude", nargs="*", default=[], metavar="FILE", help="keep out the prompts of these files")
    args = parse_args(parser)

    # Read everything before the first write.
    if args.sample is not None:
        args.prompts = None  # a preset's
        if args.sample < 1:
            raise UserError(f"--sample {args.sample}: must be at least 1")
    elif args.prompts is None:
        raise UserError("give --prompts FILE, or --sample N to sample from the grammar")
    excluded = {normalise(p): Path(f).name for f in args.exclude for p in read_prompts(f)}
    lexicon, prompts = load_lexicon(args.lexicon), args.prompts and read_prompts(args.prompts)
    args.prompts, args.lexicon = (path and file_id(path) for path in (args.prompts, args.lexicon))
    args.exclude = sorted(map(file_id, args.exclude))

    out, rejects, settings = (args.run / name for name in ("atoms.jsonl", "rejected.jsonl", "atoms.settings.json"))
    if out.exists():
        if not require_same(settings, args, ("dtype",) if args.sample else ("dtype", "seed")):
            raise UserError(f"{out}: exists without {settings.name}; use another --run")
        print(f"{out} is done: ", end="")
        return report(read_jsonl(out))

    atoms, rejected = build(prompts or sample_prompts(args.sample, lexicon, args.seed, excluded), lexicon, excluded)
    if not atoms:
        raise UserError(f"no prompt is left of {len(rejected)}; {rejected[0]['prompt']!r}: {rejected[0]['reason']}")

    write_settings(settings, args)  # atoms.jsonl comes last: where it is, the stage is done
    rejects.unlink(missing_ok=True)
    if rejected:
        write_text(rejects, "".join(json.dumps(row) + "\n" for row in rejected))
    write_text(out, "".join(json.dumps(row) + "\n" for row in atoms))
    report(atoms)
    if rejected:
        print(f"{len(rejected)} rejected, see {rejects}; {rejected[0]['prompt']!r}: {rejected[0]['reason']}")


if __name__ == "__main__":
    run_main(main)
