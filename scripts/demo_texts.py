"""Text that this project writes itself for the demo model: the pointing task, small tales, small chats.

All of it is seeded: the same seed gives the same text. Used by demo_corpus.py, train_demo.py and eval_demo.py.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# ---------------------------------------------------------------- the task: who is pointed at, again and again
#
#   Pointing. Kim points at Tom. Sam points at Sam. Tom points at Sam. ... From Kim: Sam. From Tom: Sam. ...
#
# A row tells a few chains of names in shuffled order; the last of a chain points at itself. The answer is the end of the
# chain, so it takes as many look-ups, one after another, as the name is steps away. Training asks after every loop: after
# loop t the model should hold the name min(t, steps) steps on.

NAMES = (
    "Tom Ann Kim Sam Bob Amy Ben Eve Dan Joe Max Ray Lee Roy Jim Pat Sue Ian Leo Mia Ali Ivy Ted Ron Tim Ken Meg Kate "
    "Jack Emma Mary John Paul Mark Luke Adam Noah Jane Anna Lucy Rose Ruth Dave Mike Nick Pete Alex Carl Eric Fred"
).split()
MAX_STEPS = 8
CHAINS = (8, 5, 3)  # steps from the first name of each chain to its last: what evaluation asks


@dataclass(frozen=True)
class Pointings:
    """A batch of the task.

    Attributes:
        tokens: (rows, length) ids; what follows the last question is full stops.
        asked_at: (questions,) position of each question's colon; the next token is the answer. Equal in all rows.
        steps: (rows, questions) how far the end of the chain is.
        path: (rows, questions, MAX_STEPS) the names 1, 2, ... steps on; the end repeats.
        used: how many tokens of a row are text.
    """

    tokens: np.ndarray
    asked_at: np.ndarray
    steps: np.ndarray
    path: np.ndarray
    used: int


@dataclass(frozen=True)
class PointTask:
    """Token ids of the task's words; every name and word is one GPT-2 token (checked by `from_tokenizer`)."""

    names: np.ndarray
    head: tuple[int, ...]
    points_at: tuple[int, int]
    stop: int
    from_: int
    colon: int

    @classmethod
    def from_tokenizer(cls, tokenizer: object) -> PointTask:
        def one(text: str) -> int:
            ids = tokenizer.encode(text).ids  # type: ignore[attr-defined]
            if len(ids) != 1:
                raise ValueError(f"{text!r} is {len(ids)} tokens, not one")
            return int(ids[0])

        names = np.array([one(f" {name}") for name in NAMES])
        head = tuple(tokenizer.encode("Pointing.").ids)  # type: ignore[attr-defined]
        return cls(names, head, (one(" points"), one(" at")), one("."), one(" From"), one(":"))

    def batch(
        self,
        rng: np.random.Generator,
        rows: int,
        length: int,
        chains: Sequence[int] = CHAINS,
        most: int = 64,
    ) -> Pointings:
        """Rows of `chains` (steps of each) and a question for every name that is not an end, in random order, `most` at most."""
        to, far = [], []  # per name: the index of the next one, the steps to the end
        for steps in chains:
            first = len(to)
            to += [first + min(i + 1, steps) for i in range(steps + 1)]
            far += [steps - i for i in range(steps + 1)]
        next_, steps_left = np.array(to), np.array(far)
        num_names = len(to)
        names = self.names[np.argsort(rng.random((rows, len(self.names))), axis=1)[:, :num_names]]
        row = np.arange(rows)[:, None]
        told = np.argsort(rng.random((rows, num_names)), axis=1)
        facts = np.empty((rows, num_names, 5), np.int64)
        facts[:, :, 0] = names[row, told]
        facts[:, :, 1], facts[:, :, 2] = self.points_at
        facts[:, :, 3] = names[row, next_[told]]
        facts[:, :, 4] = self.stop
        head = np.tile(np.array(self.head), (rows, 1))
        before = head.shape[1] + 5 * num_names
        starts = np.flatnonzero(steps_left > 0)
        num_questions = min((length - before) // 5, len(starts), most)
        if num_questions < 1:
            raise ValueError(f"{length} tokens have no room for {num_names} names and a question")
        start = starts[np.argsort(rng.random((rows, len(starts))), axis=1)[:, :num_questions]]
        path = np.empty((rows, num_questions, MAX_STEPS), np.int64)
        at = start
        for i in range(MAX_STEPS):
            at = next_[at]
            path[:, :, i] = names[row, at]
        questions = np.empty((rows, num_questions, 5), np.int64)
        questions[:, :, 0] = self.from_
        questions[:, :, 1] = names[row, start]
        questions[:, :, 2] = self.colon
        questions[:, :, 3] = path[:, :, -1]
        questions[:, :, 4] = self.stop
        tokens = np.concatenate(
            [head, facts.reshape(rows, -1), questions.reshape(rows, -1)], axis=1
        )
        used = tokens.shape[1]
        tokens = np.pad(tokens, ((0, 0), (0, length - used)), constant_values=self.stop)
        return Pointings(
            tokens, before + 2 + 5 * np.arange(num_questions), steps_left[start], path, used
        )


# ---------------------------------------------------------------- small tales

HEROES = ["a little fox", "an old fisherman", "a young girl", "a small boy", "a clever mouse", "a poor farmer", "a brave sailor",
          "a lonely giant", "a shy rabbit", "a merry tailor", "a tired soldier", "an honest miller", "a curious bird", "a young queen",
          "a grey donkey", "a lost lamb", "a patient gardener", "a proud cat"]  # fmt: skip
PLACES = ["by the sea", "at the edge of a dark forest", "in a village under the hills", "beside a slow green river",
          "in a small house on a mountain", "near an old stone bridge", "in a town with seven gates", "on an island far away",
          "behind the mill", "in a garden full of roses"]  # fmt: skip
WISHES = ["a golden key", "a warm coat", "a silver bell", "a friend to talk to", "a song that nobody knew", "a lamp that never went out",
          "a boat with a white sail", "the way home", "a book of stories", "a single blue flower", "a bag of seeds", "a good night's sleep"]  # fmt: skip
HELPERS = ["an owl", "a stranger with a lantern", "an old woman", "a toad", "a travelling musician", "a white horse", "the wind",
           "a child with bare feet", "a hedgehog", "the moon"]  # fmt: skip
TROUBLES = ["a great storm came, and the road was washed away", "a wolf stood on the path and would not move",
            "the snow fell for nine days", "the bridge was broken", "thieves came in the night and took everything",
            "the well ran dry", "the light went out, and it was very dark", "nobody would open the door"]  # fmt: skip
LESSONS = ["Since then, people there are kind to strangers.", "And if you go there today, you can still hear the bell.",
           "So it is better to ask than to be afraid.", "And they all lived in peace for many years.",
           "That is why the door is never locked.", "And nobody was hungry in that house again.",
           "A little help is worth more than gold.", "And in the evening they told this story."]  # fmt: skip
OPENINGS = ["Once upon a time there was {hero} who lived {place}.", "There was once {hero}, and the home of {short} was {place}.",
            "Long ago, {place}, there lived {hero}.", "{Place} there once lived {hero}.",
            "Many years ago {hero} lived {place}, quite alone."]  # fmt: skip
WANTS = ["Every night {short} dreamed of {wish}.", "{Short} had almost everything, but not {wish}.", "More than anything, {short} wanted {wish}.",
         "One morning {short} woke up and thought of nothing but {wish}.", "All that {short} ever asked for was {wish}."]  # fmt: skip
SETTINGS_OUT = ["So one day {short} shut the door and went out to look for it.", "\"I will go and find it,\" said {short}, and set out at once.",
                "\"It will not come to me if I sit here,\" said {short}, and began to walk.", "So {short} took some bread and a stick and left before the sun was up."]  # fmt: skip
BLOCKS = [
    "But on the third day {trouble}.",
    "But before long {trouble}.",
    "The way was long, and then {trouble}.",
    "It went well at first. Then {trouble}.",
]
MEETINGS = ["Then {helper} came by and asked, \"Why are you so sad?\"", "Just then {helper} stopped and said, \"You look as if you need help.\"",
            "\"Where are you going?\" asked {helper}.", "{Short} sat down and cried, until {helper} came and listened."]  # fmt: skip
ANSWERS = ["\"I am looking for {wish},\" said {short}, \"and I cannot go on.\"", "{Short} told the whole story, from the first day to the last.",
           "\"All I want is {wish},\" said {short}."]  # fmt: skip
GIFTS = ["\"Then come with me,\" said the other. \"It is not far, if two walk together.\"", "\"Wait until morning,\" was the answer, \"and look under the oldest tree.\"",
         "\"Share your bread with me,\" came the answer, \"and I will show you.\" And {short} gave away the last piece.",
         "\"You have had it all along,\" was the answer. \"Turn round and look.\""]  # fmt: skip
ENDINGS = ["And so it was: when the sun came up, {short} had found {wish}.", "And when {short} came home again, {wish} was waiting there.",
           "They walked all night, and in the morning {short} found {wish} at last.", "{Short} laughed out loud, for there it was: {wish}."]  # fmt: skip


def tale(rng: random.Random) -> str:
    """One small tale of nine sentences."""
    hero = rng.choice(HEROES)
    short = "the " + hero.split(" ", 1)[1].split()[-1]
    place, helper = rng.choice(PLACES), rng.choice(HELPERS)
    words = {"hero": hero, "short": short, "Short": short.capitalize(), "place": place, "Place": place[0].upper() + place[1:],
             "wish": rng.choice(WISHES), "helper": helper, "trouble": rng.choice(TROUBLES)}  # fmt: skip
    parts = [OPENINGS, WANTS, SETTINGS_OUT, BLOCKS, MEETINGS, ANSWERS, GIFTS, ENDINGS, LESSONS]
    sentences = [rng.choice(options).format(**words) for options in parts]
    return " ".join(sentences[:4]) + "\n\n" + " ".join(sentences[4:])


# ---------------------------------------------------------------- small chats

GREETINGS = (
    ["Hello!", "Hi!", "Hello, how are you?", "Hey there.", "Good morning!", "Hi, how are you today?", "Hello", "Hello there!", "Hi there",
     "Good evening."],
    ["Hello! I am doing well, thank you. How are you?", "Hi! I am fine, thanks. What would you like to talk about?",
     "Hello! It is nice to meet you. How is your day going?", "Hi there! I am very well. How are you doing?"],
)  # fmt: skip
SUBJECTS = [
    (["Who are you?", "What are you?", "What is your name?", "Tell me about yourself.", "Are you a person?", "Are you a robot?",
      "Hi, who am I talking to?"],
     ["I am the TinyLoop demo model, a small looped language model.",
      "I am a very small language model. One block of my layers runs again and again, once for each loop.",
      "I am TinyLoop's demo model. I am small, so please check what I say.",
      "I am a small program that writes English text, one token at a time."]),
    (["What is a looped model?", "How do you work?", "What are loops?", "What does looped mean?", "Why do you loop?",
      "What is a looped language model?"],
     ["A looped model applies the same layers many times. More loops mean more thinking for each word.",
      "I run one block of layers several times with the same weights. You choose how many loops I use.",
      "My middle layers are used again and again. With more loops I am slower, but I guess better.",
      "Loops make a small model deep. The weights are stored once and used at every loop."]),
    (["What can you do?", "Can you help me?", "What are you good at?", "What should I ask you?"],
     ["I can chat a little, tell a small tale, and follow a line of names. I do not know many facts.",
      "I can write a few lines in the style of old novels, plays and speeches.",
      "Not very much! I am a demo. Ask me for a story, or just say hello."]),
    (["How many loops do you use?", "How many loops should I use?", "Should I use more loops?"],
     ["Eight, unless you ask for fewer. You can set loops in your request.",
      "I was trained with one to eight loops. Eight is best, and one is fastest."]),
    (["What did you learn from?", "What were you trained on?", "What have you read?"],
     ["I have read Jane Austen, Shakespeare, old speeches, some manuals, and many small chats.",
      "Free English text: novels, plays, speeches, manuals and chats. It was not very much."]),
]  # fmt: skip
STORY_REQUESTS = [
    "Tell me a story.",
    "Can you tell me a story?",
    "Tell me a tale.",
    "Please tell me a short story.",
    "Do you know a story?",
]
GOODBYES = [
    (["Thank you.", "Thanks!", "Thanks a lot, that helps.", "Thank you very much."],
     ["You are welcome!", "You are very welcome. Have a nice day!", "My pleasure."]),
    (["Goodbye.", "Bye!", "See you later.", "Good night!", "I have to go now."],
     ["Goodbye! It was nice talking to you.", "Bye! Have a good day.", "See you soon. Take care!"]),
]  # fmt: skip


def own_chat(rng: random.Random) -> list[str]:
    """Turns of one small chat; user first, then alternating."""
    groups = [
        rng.choice([GREETINGS, GREETINGS, None]),
        *rng.sample(SUBJECTS, rng.randint(1, 3)),
        rng.choice([*GOODBYES, None]),
    ]
    turns = [rng.choice(side) for group in groups if group for side in group]
    if rng.random() < 0.4:
        at = 2 * rng.randint(0, len(turns) // 2)
        turns[at:at] = [rng.choice(STORY_REQUESTS), tale(rng).replace("\n\n", " ")]
    return turns


def capital_chat(rng: random.Random, state: str, capital: str) -> list[str]:
    question = rng.choice(
        [
            "What is the capital of {}?",
            "Which city is the capital of {}?",
            "Tell me the capital of {}.",
        ]
    )
    answer = rng.choice(["The capital of {} is {}.", "It is {1}.", "{1} is the capital of {0}."])
    return [question.format(state), answer.format(state, capital)]
