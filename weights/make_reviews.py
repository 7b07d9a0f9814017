"""Makes the built-in reviews: sentences of known hardness, composed by a small grammar. No text of others is used.

    python -m mini_ee.weights.make_reviews        # writes mini_ee/data/reviews.tsv, the same bytes each time

Template slots: {+adj} takes a word of the label's polarity, {-adj} one of the other polarity, {thing}
and the like a neutral word. An entry of a kind is a pair of templates, filled with the same words as
*twins*, one for each label; a single template is its own twin. In a hard kind

    +slots of one twin = -slots of the other, and the reverse,

so each polar word occurs equally often with both labels, and a bag of words predicts no better than chance.
mini_ee/data/reviews.py describes the kinds. Deviations: none, there is no paper. Symbols: none.
"""

import random
import re
from typing import NamedTuple

from mini_ee.data.files import write_bytes
from mini_ee.data.reviews import FILE, HARDNESS, Review

SHARES = (30, 20, 10, 10, 10, 10, 10)                    # percent of every split, in the order of HARDNESS

def _list(text: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in text.split(","))

# ---- polar words: (negative, positive), indexed by polarity -------------------------------------------------------------------
# Only mild words stand under a negator: "not bad" is good, but what is "not hideous", or "not sublime"? MILD, LIKE and the first
# N_MILD of the other lists are mild.
N_MILD = 4

OWN_WEIGHT = 4                                          # a domain's own adjectives are few, and drawn so much oftener

STRONG = (_list("terrible, awful, dreadful, horrible, horrid, atrocious, abysmal, appalling, disgraceful, pathetic, lousy, rotten, "
                "hopeless, worthless, dismal, ghastly, miserable, shoddy, deplorable, hideous, wretched, disastrous, dire, "
                "woeful, shameful, laughable, unacceptable, third-rate, useless, mediocre, lamentable, inexcusable"),
          _list("wonderful, excellent, superb, fantastic, brilliant, amazing, outstanding, terrific, marvellous, magnificent, "
                "exceptional, incredible, fabulous, splendid, phenomenal, stunning, perfect, flawless, awesome, first-rate, "
                "delightful, beautiful, glorious, exquisite, sublime, top-notch, extraordinary, spectacular, "
                "sensational, faultless, lovely"))

MILD = (_list("bad, poor, disappointing, unpleasant, dull, annoying, unsatisfying, irritating"),
        _list("good, great, nice, impressive, satisfying, remarkable, pleasing, convincing"))

MANNER = (_list("rude, unfriendly, unhelpful, careless, impatient, arrogant, incompetent, lazy, dishonest, impolite, grumpy, hostile"),
          _list("friendly, helpful, polite, competent, kind, patient, professional, attentive, courteous, thoughtful, charming, welcoming"))

FELT = (_list("disappointed, bored, dissatisfied, annoyed, frustrated, disgusted, angry, upset, unimpressed, furious, let down"),
        _list("delighted, happy, pleased, impressed, satisfied, thrilled, cheerful, enchanted, overjoyed, moved, inspired"))

LOVE = (_list("hate/hated, dislike/disliked, detest/detested, loathe/loathed, despise/despised"),
        _list("love/loved, enjoy/enjoyed, adore/adored, like/liked, admire/admired"))

LIKE = (_list("regret/regretted, dislike/disliked"), _list("enjoy/enjoyed, like/liked"))

STIR = (_list("bore/bored, annoy/annoyed, disappoint/disappointed, irritate/irritated, disgust/disgusted, frustrate/frustrated, "
              "anger/angered, depress/depressed"),
        _list("delight/delighted, impress/impressed, charm/charmed, thrill/thrilled, please/pleased, amaze/amazed, "
              "enchant/enchanted, inspire/inspired"))

NOUN = (_list("a failure, a disappointment, a letdown, a mistake, a disaster, a mess, a nightmare, a flop, a disgrace, an insult, "
              "an ordeal, an embarrassment, a fiasco"),
        _list("a success, a pleasure, a treat, a delight, a masterpiece, a triumph, a joy, a gem, a winner, a wonder, a treasure, "
              "a revelation, a dream come true"))

PHRASE = (_list("a waste of money, a waste of time, money down the drain, a complete rip-off, a bad choice"),
          _list("worth every penny, worth the wait, money well spent, time well spent, a good choice"))

ADVERB = (_list("badly, poorly, terribly, carelessly, horribly, clumsily, dreadfully, lazily"),
          _list("well, beautifully, superbly, wonderfully, brilliantly, perfectly, skilfully, expertly"))

BEST = (_list("worst, dullest, poorest"), _list("best, finest, nicest"))

ACT = (_list("complain about it, ask for a refund, avoid it"), _list("recommend it, come back, do this again"))

class Domain(NamedTuple):
    """What is reviewed. `did`, `doing`: what one does with it. `early`: a small side of it; `parts`: larger ones."""
    did: str
    doing: str
    made: str
    things: tuple[str, ...]
    early: tuple[str, ...]
    parts: tuple[str, ...]
    people: tuple[str, ...]
    own: tuple[tuple[str, ...], tuple[str, ...]]         # its own adjectives, (negative, positive), mild ones first

def _domain(did: str, doing: str, made: str, *lists: str) -> Domain:
    *neutral, bad, good = (_list(text) for text in lists)
    return Domain(did, doing, made, *neutral, (bad, good))

DOMAINS = (
    _domain("watched", "watching", "directed", "film, movie, comedy, thriller, documentary, sequel, drama", "trailer, poster, opening scene",
            "acting, script, plot, ending, dialogue, story, camera work, special effects, actors", "usher, ticket seller, cinema manager",
            "tedious, predictable, boring, pointless, clumsy, silly, lifeless, confusing",
            "gripping, funny, clever, entertaining, moving, thrilling, hilarious, touching"),
    _domain("read", "reading", "written", "book, novel, memoir, biography, short story, poem", "cover, first page, title",
            "plot, writing, ending, style, story, characters, language, dialogue", "bookseller, librarian, publisher",
            "tiresome, shallow, boring, pretentious, long-winded, lifeless, incoherent, unreadable",
            "captivating, insightful, engaging, absorbing, witty, profound, fascinating, inspiring"),
    _domain("ate at", "eating at", "run", "restaurant, cafe, diner, bistro, pizzeria", "sign outside, entrance, website",
            "food, service, wine, atmosphere, cooking, coffee, desserts, drinks, lunch, dinner", "waiter, chef, waitress, owner, barman",
            "dirty, overpriced, unwelcoming, noisy, filthy, chaotic", "cosy, inviting, clean, welcoming, stylish, elegant"),
    _domain("ate", "eating", "cooked", "soup, curry, cake, pizza, salad, burger, steak, meal", "smell, packaging, garnish",
            "sauce, taste, seasoning, texture, vegetables, flavour", "cook, chef, baker",
            "bland, tasteless, greasy, overcooked, soggy, stale, inedible, disgusting",
            "delicious, tasty, fresh, appetising, flavourful, mouth-watering, succulent, scrumptious"),
    _domain("stayed at", "staying at", "managed", "hotel, hostel, guest house, resort, inn", "lobby, website, car park",
            "room, bed, breakfast, pool, view, bathroom, service, rooms", "receptionist, manager, porter, cleaner",
            "noisy, uncomfortable, dirty, shabby, filthy, run-down, depressing", "comfortable, clean, relaxing, inviting, luxurious, peaceful, charming"),
    _domain("bought", "buying", "designed", "phone, laptop, camera, tablet, watch, vacuum cleaner, coffee machine", "box, manual, advertisement",
            "screen, battery, sound, software, design, picture, buttons", "seller, shop assistant, helpline operator",
            "unreliable, slow, flimsy, overpriced, faulty, clunky, defective", "reliable, fast, sturdy, durable, powerful, handy, well-made"),
    _domain("listened to", "listening to", "performed", "album, concert, song, record, symphony, musical", "cover art, video, first minute",
            "singing, melody, rhythm, voice, production, lyrics, guitar, drums", "sound engineer, host, ticket seller",
            "monotonous, repetitive, boring, forgettable, unbearable, soulless, uninspired",
            "catchy, uplifting, soulful, enjoyable, powerful, unforgettable, magical"),
    _domain("attended", "attending", "taught", "course, lesson, workshop, class, seminar, lecture", "website, brochure, introduction",
            "material, teaching, content, explanation, structure, exercises, examples", "teacher, tutor, professor, instructor",
            "boring, confusing, stressful, pointless, chaotic, frustrating", "useful, clear, worthwhile, instructive, motivating, inspiring"),
    _domain("booked", "booking", "organised", "guided tour, repair, delivery, haircut, boat trip, massage", "website, brochure, first phone call",
            "advice, planning, service, communication, support", "assistant, secretary, lady on the phone, man in charge",
            "unprofessional, stressful, overpriced, chaotic, frustrating, unreliable", "professional, worthwhile, rewarding, enjoyable, reliable, efficient"),
)

NEUTRAL = {
    "who": _list("I, we, my wife and I, the children, my parents, our whole family, everyone in our group, my husband"),
    "said": _list("my sister, a colleague, my neighbour, an old friend, my brother, my boss"),
    "all": _list("all my friends, the newspapers, all the critics, my colleagues, the people next door, my cousins"),
    "worker": _list("plumber, driver, guide, dentist, doctor, nurse, hairdresser, mechanic, electrician, gardener"),
    "when": _list("last Friday, two weeks ago, yesterday, in the spring, on a Tuesday, over the holidays, last month, on my birthday"),
    "with": _list("with two friends, with the neighbours, with some old friends, for the first time, on a rainy afternoon, before noon"),
    "fact": _list("it was ~raining, we were ~alone, it was ~a Monday, I was ~travelling for work, my sister was ~with us, "
                  "we had ~planned it, I had ~read about it before, we were ~in a group, it was ~a holiday, it was ~late in the day"),
}

# ---- the grammar: per kind, templates or twins of templates -------------------------------------------------------------------------
PLAIN = (
    "{+verbed} it.", "{+adj} {thing}.", "What a {+adj} {thing}!", "The {thing} was {+adj}.", "I {+verbed} the {thing}.",
    "This {thing} is {+adj}.", "The {person} was {+manner}.", "The {thing} was {+noun}.", "It was {+phrase}.", "The {thing} {+stirred} me.",
    "{who} left {+felt}.", "The {thing} was {+adverb} {made}.", "{who} found the {part} {+any}.", "I {+verb} this {thing}.",
    "The {part} was {+any}.", "Such a {+adj} {thing}.", "Absolutely {+strong}.", "Very {+mild} {thing}.", "So {+manner}, this {person}!",
    "{+any} {bit}!", "It is a {+adj} {thing}.", "{who} {+verbed} every minute of it.", "I am {+felt}.", "This is {+noun}.",
    "Really {+soft} {part}.", "What a {+any} experience.", "I {+liked} {doing} this {thing}.", "{who} {+verbed} the {part}.", "The {thing} is {+phrase}.",
    "{+strong}, simply {+strong2}.", "{+adverb} {made}.", "You will {+verb} this {thing}.", "It has been {+noun} from start to finish.",
    "The {+best} {thing} I know.", "I will {+act}.", "It will {+stir} you.", "It is the {+best} {thing} that we ever {did}.", "Our {worker} was {+manner}.", "Our {worker} is the {+best}.", "A {+manner} {person} and a {+adj} {thing}.", "What {+noun}!", "The {thing} looks {+any}.",
    "I think the {thing} is {+adj}.", "Everything about it was {+any}.", "The {person} has been so {+manner}!", "{+phrase}.",
)

WORDY = (
    "{who} {did} the {thing} {when} {with}, and it was {+adj}.",
    "{when} {who} {did} a {thing} that a colleague had mentioned at lunch, and it turned out to be {+noun}.",
    "From the {early} to the {part}, everything about this {thing} was {+any}.",
    "The {thing} that {who} {did} {when} was {+adj}, and the {person} was {+manner} as well.",
    "After the long drive home {when}, I told my neighbour over the fence that the {thing} had been {+phrase}.",
    "{when} {who} went into town {with}, {did} the {thing} and came home {+felt}.",
    "In the two years since we moved to this part of the country, this is the {+best} {thing} that we ever {did}.",
    "I am writing this on the train: the {part} was {+any}, the {early} was {+any2}, and I {+verbed} all of it.",
    "When I think of the {thing} that {who} {did} {when}, the word that comes to mind is {+any}.",
    "{who} {did} the {thing} {when}, and the {person}, who must have been about forty, was {+manner} from beginning to end.",
    "My aunt, who lives around the corner and does this every week, says that the {thing} was {+adverb} {made}.",
    "About thirty of us {did} the {thing} {when}, most of us students, and it {+stirred} every one of us.",
    "{who} talked about it on the bus afterwards and agreed that the {part} was {+any} and the {thing} {+adj}.",
    "It took us an hour to get there by bus and on foot, and {who} {+verbed} the {thing} that we had heard so much about.",
    "The {thing}, which {who} {did} {when} {with}, was {+phrase}.",
    "If you ask me what I remember of the {thing} a month later, it is how {+any} the {part} was.",
)

NEGATED = (                                              # (the negator is beside the point, the negator flips the polar word)
    ("No doubt about it, the {thing} was {+mild}.", "The {thing} was not {-mild}."),
    ("The {thing} was {+mild}, and {nofact}.", "The {thing} was not {-mild}, and {fact}."),
    ("{nofact}, and the {thing} was {+mild}.", "{fact}, and the {thing} was not {-mild}."),
    ("I will not lie, the {part} was {+soft}.", "I will be honest, the {part} was not {-soft}."),
    ("I did {+like} it, no doubt.", "I did not {-like} it."),
    ("I did {+like} {doing} the {thing}, and {nofact}.", "I did not {-like} {doing} the {thing}, and {fact}."),
    ("I {+liked} {doing} the {thing}, and {nofact}.", "I never {-liked} {doing} the {thing}, and {fact}."),
    ("The {thing} was nothing but {+adj}.", "The {thing} was anything but {-adj}."),
    ("The {person}, who was not from here, was {+mildmanner}.", "The {person}, who was from here, was not {-mildmanner}."),
    ("Our {worker} was {+mildmanner}, and {nofact}.", "Our {worker} was not {-mildmanner}, and {fact}."),
    ("Not surprisingly, the {thing} was {+mild}.", "Surprisingly, the {thing} was not {-mild}."),
    ("Not long ago I {did} a {thing}, and it was {+mild}.", "Long ago I {did} a {thing}, and it was not {-mild}."),
    ("We were {+mildfelt} that day, and {nofact}.", "We were by no means {-mildfelt} that day, and {fact}."),
    ("The {thing} {+mildstirred} us, and {nofact}.", "The {thing} never {-mildstirred} us, and {fact}."),
    ("It is no secret that the {part} was {+soft}.", "It is obvious that the {part} was hardly {-soft}."),
    ("The {thing} was {+phrase}, no doubt.", "The {thing} was certainly not {-phrase}."),
    ("There is no denying that the {thing} was {+mildnoun}.", "There is no way to call the {thing} {-mildnoun}."),
    ("No joke, a {+mild} {thing}.", "Not a {-mild} {thing}."),
    ("Not far from home, {who} {did} a {thing} that was {+mild}.", "Close to home, {who} {did} a {thing} that was far from {-mild}."),
    ("This {thing} is {+mild}, isn't it?", "This {thing} isn't {-mild}, is it?"),
    ("I did not need long to see that the {part} was {+soft}.", "I needed long to see that the {part} was not {-soft}."),
    ("The {thing} is {+mild}. {nofact}.", "The {thing} is not {-mild}. {fact}."),
    ("I am not surprised at all, this {thing} is {+mild}.", "This {thing} is not {-mild} at all."),
    ("No question, I will {+act}.", "I will not {-act}."),
)

CONTRASTED = (                                           # +: the verdict, -: what is conceded
    "The {early} was {-any}, but the {thing} itself was {+any}.",
    "Although the {early} was {-any}, the {thing} as a whole was {+any}.",
    "The {thing} was {+any}, although the {early} was {-any}.",
    "The {thing} was {+any} overall, even though the {part} was {-any}.",
    "Despite the {-any} {early}, this was a {+any} {thing}.",
    "It was a {+any} {thing}, despite the {-any} {part}.",
    "{who} {-verbed} the {early}, but we all {+verbed} the {thing}.",
    "We all {+verbed} the {thing}, even though {who} {-verbed} the {early}.",
    "Yes, the {part} was {-any}, but all in all the {thing} is {+any}.",
    "For all its {-any} {part}, the {thing} was {+any}.",
    "The {-any} {early} aside, this is a {+any} {thing}.",
    "The {early} {-stirred} me, but the {thing} {+stirred} me all the more.",
    "It may have been {-noun} at first, but by the end it was {+noun}.",
    "{who} found the {part} {-any}; even so, the {thing} was {+any} on the whole.",
    "I was {-felt} at the start, but at the end of the day I was {+felt}.",
    "I was {+felt} in the end, although I had been {-felt} at the start.",
    "Some call it {-phrase}, but I call it {+phrase}.",
)

MISLEADING = (                                           # (they were right, they were wrong), or -: what they said, +: how it was
    ("{all} told me that the {thing} was {+any}, {+any2} and {+any3}, and they were right.",
     "{all} told me that the {thing} was {-any}, {-any2} and {-any3}, and they were wrong."),
    "{said} told me to expect a {-any} {thing}, and what I got was a {+any} one.",
    ("{all} called the {thing} {-any} and {-any2}, so I thought I knew what to expect, and then it was {+any}.",
     "{all} called the {thing} {-any}, so I thought I knew what to expect, and then it was {+any} and {+any2}."),
    ("I had read everywhere that the {thing} was {+noun}, and by the end I agreed with every word.",
     "I had read everywhere that the {thing} was {-noun}, and by the end I disagreed with every word."),
    ("For weeks {all} had gone on about how {+any} the {part} was, and it turned out to be true.",
     "For weeks {all} had gone on about how {-any} the {part} was, and the opposite turned out to be true."),
    "I expected to be {-felt} when I {did} the {thing} {when}, and instead I was {+felt}.",
    "The {thing} that {said} had described to me as {-any} was {+any} in every way.",
    ("If you believe {all}, this {thing} is {+any} and {+any2}, and you should believe them.",
     "If you believe {all}, this {thing} is {-any} and {-any2}, and you should not believe them."),
    "What {said} had called {-noun} was, when I finally {did} the {thing} myself, {+noun}.",
    "{all} call the {thing} {-any} and {-any2}; having seen for myself, I can only call it {+any} and {+any2}.",
    ("{said} swore that I would {+verb} the {thing} from the start, and that is exactly what happened.",
     "{said} swore that I would {-verb} the {thing} from the start, and exactly the opposite happened."),
    ("The {person} had been described to me as {+manner} and {+manner2}, which is the plain truth.",
     "The {person} had been described to me as {-manner} and {-manner2}, which is the opposite of the truth."),
)

HEDGED = (                                               # -: what did not happen, +: what did
    "It might have been a {-any} {thing} if the {part} had not been so {+any}.",
    "Without the {+any} {part}, it would have been a {-any} {thing}.",
    "Had the {part} not been so {+any}, I might have called the {thing} {-any}.",
    "What could have been a {-any} {thing} was in fact a {+any} one.",
    "Only the {+any} {part} kept this from being a {-any} {thing}.",
    "I would have called the {thing} {-any} if the {part} had not been so {+any}.",
    "It could easily have been {-noun}, and it ended up as {+noun}.",
    "I was ready to call the {thing} {-any} until I noticed how {+any} the {part} was.",
    "The {thing} would have {-stirred} me if the {part} had not {+stirred} me so much.",
    "But for the {+any} {part}, this would have been a {-any} {thing}.",
    "I would have left feeling {-felt} if the {part} had not left me feeling so {+felt}.",
    "If the {part} were not so {+any}, I would call the {thing} {-any}.",
    "If the {person} had been less {+manner}, I might have called the whole team {-manner}.",
)

DOUBLY = (                                               # (the negators cancel out, one of them is beside the point)
    ("I will not tell you that the {thing} was not {+mild}.", "I will not lie to you: the {thing} was not {-mild}."),
    ("Nobody could say that the {thing} was not {+mild}.", "Nobody paid me to say that the {thing} was not {-mild}."),
    ("It is not true that the {part} was not {+soft}.", "It is not a secret that the {part} was not {-soft}."),
    ("Do not believe anyone who says that the {thing} is not {+mild}.", "Do not doubt anyone who says that the {thing} is not {-mild}."),
    ("There was never a moment when the {thing} was not {+mild}.", "There was never a doubt that the {thing} was not {-mild}."),
    ("I cannot claim that I did not {+like} {doing} the {thing}.", "I cannot hide that I did not {-like} {doing} the {thing}."),
    ("Not one of us came home without feeling {+mildfelt}.", "Not one of us, not even my brother, came home feeling {-mildfelt}."),
    ("The {thing} never once failed to {+mildstir} us.", "The {thing} never, not even once, managed to {-mildstir} us."),
    ("It would not be right to say that the {thing} was not {+phrase}.", "It would not be wrong to say that the {thing} was not {-phrase}."),
    ("I do not know anyone who did not find the {thing} {+mild}.", "I do not mind saying that I did not find the {thing} {-mild}."),
    ("I have no reason to say that the {person} was not {+mildmanner}.", "I have no reason to hide that the {person} was not {-mildmanner}."),
    ("You cannot say that this {thing} is not {+mildnoun}.", "You cannot be surprised that this {thing} is not {-mildnoun}."),
)

GRAMMAR = dict(zip(HARDNESS, (PLAIN, WORDY, NEGATED, CONTRASTED, MISLEADING, HEDGED, DOUBLY)))

# ---- the generator ------------------------------------------------------------------------------------------------------------------
SLOT = re.compile(r"\{([+-]?)([a-z]+)(\d?)\}")

CONTRACTIONS = ((r"\b(was|were|did|had|is|would|has|does) not\b", r"\1n't"), (r"\bcannot\b", "can't"), (r"\bwill not\b", "won't"),
                (r"\b([Dd]o) not\b", r"\1n't"), (r"\b([Ii]t) is\b", r"\1's"), (r"\bI am\b", "I'm"))

PLURALS = tuple(part for domain in DOMAINS for part in domain.parts if part.endswith("s"))

PLURAL_VERB = re.compile(rf"\b({'|'.join(PLURALS)}) was\b")

def _polar_words(slot: str, polarity: int, domain: Domain) -> tuple[str, ...]:
    own, strong, mild = domain.own[polarity], STRONG[polarity], MILD[polarity]
    adjectives = {"adj": strong + mild + own * OWN_WEIGHT, "mild": mild + own[:N_MILD] * OWN_WEIGHT,      # for the thing only
                  "any": strong + mild, "soft": mild, "strong": strong}                                  # for its parts too
    if slot in adjectives:
        return adjectives[slot]
    if slot.startswith("mild"):
        return _polar_words(slot.removeprefix("mild"), polarity, domain)[:N_MILD]
    verbs = {"verb": (LOVE, 0), "verbed": (LOVE, 1), "like": (LIKE, 0), "liked": (LIKE, 1), "stir": (STIR, 0), "stirred": (STIR, 1)}
    if slot in verbs:
        words, form = verbs[slot]
        return tuple(word.split("/")[form] for word in words[polarity])
    return {"manner": MANNER, "felt": FELT, "noun": NOUN, "phrase": PHRASE, "adverb": ADVERB, "best": BEST, "act": ACT}[slot][polarity]

def _neutral_words(slot: str, domain: Domain) -> tuple[str, ...]:
    if slot in NEUTRAL:
        return NEUTRAL[slot]
    singular = tuple(part for part in domain.parts if part not in PLURALS)
    return {"thing": domain.things, "early": domain.early, "part": domain.parts, "bit": singular, "person": domain.people,
            "did": (domain.did,), "doing": (domain.doing,), "made": (domain.made,)}[slot]

def _fill(template: str, label: int, domain: Domain, chosen: dict, rng: random.Random) -> str:
    """Fill the slots; `chosen` remembers the words, so that the twin gets the same ones."""
    def word(match: re.Match) -> str:
        sign, slot, number = match.groups()
        polarity = {"": None, "+": label, "-": 1 - label}[sign]
        key = "fact" if slot == "nofact" else slot + number, polarity
        if key not in chosen:
            words = _polar_words(slot, polarity, domain) if sign else _neutral_words(key[0], domain)
            chosen[key] = rng.choice([word for word in words if word not in chosen.values()])
        return chosen[key].replace("~", "not " if slot == "nofact" else "")

    return SLOT.sub(word, template)

def _polish(text: str, contract: bool, lower: bool, ending: str) -> str:
    """Agreement (were, an), contractions, capitals, and the last punctuation mark."""
    text = PLURAL_VERB.sub(r"\1 were", text)
    text = re.sub(r"\b([Aa]) (?=[aeio]|un|ug|up|hon)", r"\1n ", text)
    for pattern, short in CONTRACTIONS if contract else ():
        text = re.sub(pattern, short, text)
    text = re.sub(r"(^|[.!?] )([a-z])", lambda m: m[1] + m[2].upper(), text)
    text = text.lower() if lower else text
    return text[:-1] + ending if text[-1] == "." else text

def _twins(hardness: str, first: int, rng: random.Random) -> list[Review]:
    """Two reviews with the labels first, 1 - first; in a hard kind they have the same polar words."""
    entry, domain, chosen = rng.choice(GRAMMAR[hardness]), rng.choice(DOMAINS), {}
    templates = (entry, entry) if isinstance(entry, str) else entry
    style = rng.random() < .5, rng.random() < .1, rng.choices((".", "!", ""), (85, 8, 7))[0]
    return [Review(_polish(_fill(template, label, domain, chosen, rng), *style), label, hardness)
            for template, label in zip(templates, (first, 1 - first))]

def _counts(size: int) -> list[int]:
    """Reviews of each kind: SHARES of `size`, what rounding leaves over to the first kinds."""
    counts = [size * share // 100 for share in SHARES]
    return [count + (k < size - sum(counts)) for k, count in enumerate(counts)]

def _words(reviews: list[Review]) -> set[str]:
    return {word for review in reviews for word in re.findall(r"[\w'-]+", review.text.lower())}

def make_reviews(seed: int = 0, *, train: int = 4000, dev: int = 600, test: int = 600) -> dict[str, list[Review]]:
    """Distinct reviews for three disjoint splits, each with the kinds in the same SHARES and the labels balanced in each kind.

    The same seed gives the same reviews in every process. Every word of dev and test occurs in train, unless train is too small
    for that. Raises: ValueError if a size is negative or the grammar runs out.

    >>> [len(reviews) for reviews in make_reviews(train=40, dev=20, test=10).values()]
    [40, 20, 10]
    """
    rng, seen, known, splits = random.Random(seed), set(), set(), {}
    for split, size in (("train", train), ("dev", dev), ("test", test)):
        if size < 0:
            raise ValueError(f"sizes must be 0 or more, got {split}={size}")
        splits[split] = []
        for hardness, count in zip(HARDNESS, _counts(size)):
            made, misses = [], 0
            while len(made) < count:
                pair = _twins(hardness, (len(made) // 2) % 2, rng)
                keys = {re.sub(r"\W", "", review.text.lower()) for review in pair}
                unknown = split != "train" and misses < 100 and not _words(pair) <= known
                if len(keys) < 2 or keys & seen or unknown:
                    misses += 1
                    if misses > 2000:
                        raise ValueError(f"cannot make {count} distinct {hardness!r} reviews for {split}={size}; ask for fewer")
                    continue
                misses = 0
                made += pair
                seen |= keys
            splits[split] += made[:count]
        rng.shuffle(splits[split])
        known = _words(splits["train"])
    return splits

def table_of(splits: dict[str, list[Review]]) -> str:
    """The content of reviews.tsv: a line for each review, below the column names."""
    rows = [(split, review.hardness, str(review.label), review.text) for split, reviews in splits.items() for review in reviews]
    return "".join("\t".join(row) + "\n" for row in [("split", "hardness", "label", "sentence"), *rows])

if __name__ == "__main__":
    write_bytes(FILE, table_of(make_reviews()).encode())
