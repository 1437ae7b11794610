"""Count right answers to forty questions about short texts, the text first and the question first.

    python scripts/measure prompt-order MODEL

`localllm run` puts files and stdin before the prompt, so that a second question finds the text in the prefix cache;
`--prompt-first` is the other way round. Greedy, 32 tokens at most; an answer is right if it has the expected words.
"""

import re
from math import comb

from common import make_parser

import localllm

TEXTS = [
    (
        "The ferry Aurora leaves Holm every day at 7:40 and returns from Skarnes at 16:15. The crossing takes 55"
        " minutes. A ticket costs 12 crowns, a bicycle 4 more; children below six travel free. From November to March"
        " there is no ferry on Tuesdays, when the crew services the engine in the yard of Lindal.",
        [("When does the ferry leave Holm?", "7:40"), ("How long is the crossing?", "55"),
         ("What does a bicycle cost?", "4"), ("On which day of the week is there no ferry in winter?", "Tuesday"),
         ("Where is the engine serviced?", "Lindal")],
    ), (
        "Invoice 2041-B. Sold to: Brandt Optics, Ulm. 3 tripods at 80.00 = 240.00; 12 lens caps at 2.50 = 30.00;"
        " shipping 15.00. Total 285.00 EUR, payable by 14 May to account DE55 1200. Questions: Frau Okafor, extension"
        " 317.",
        [("What is the number of the invoice?", "2041-B"), ("How many lens caps were sold?", "12"),
         ("What is the total?", "285"), ("By which day is it payable?", "14 May"),
         ("Whom does one ask about it?", "Okafor")],
    ), (
        "2031-04-02 08:11 api1 started, version 5.2.9\n2031-04-02 08:14 api1 request /orders took 2412 ms\n"
        "2031-04-02 08:15 db7 ERROR deadlock on table stock\n2031-04-02 08:16 api1 retry 1 of 3\n"
        "2031-04-02 08:17 api1 request /orders took 35 ms\n2031-04-02 08:20 cache2 disk 91 % full",
        [("Which version was started?", "5.2.9"), ("Which machine had a deadlock?", "db7"),
         ("Which table was it on?", "stock"), ("How full is the disk of cache2?", "91"),
         ("How long did the slower request take?", "2412")],
    ), (
        "def rebate(total, member):\n    if total < 50:\n        return 0\n    rate = 0.1 if member else 0.04\n"
        "    return round(total * rate, 2)\n\n\ndef ship(weight):\n    if weight > 30:\n"
        "        raise ValueError('too heavy')\n    return 3.5 + 0.8 * weight",
        [("What is the rate of a member?", "0.1"), ("Which error is raised if something is too heavy?", "ValueError"),
         ("Above which weight?", "30"), ("Below which total is there no rebate?", "50"),
         ("Which function computes the costs of shipping?", "ship")],
    ), (
        "Minutes, 9 June. Present: Ines, Tomasz, Yusuf; Greta was ill. The move to the office in Hafenstrasse is put"
        " off to September, because the lift is not finished. Tomasz asks three firms for offers. Ines takes over the"
        " newsletter from Greta. Next meeting: 23 June, room 4.",
        [("Who was ill?", "Greta"), ("To which month is the move put off?", "September"),
         ("What is not finished?", "lift"), ("Who takes over the newsletter?", "Ines"),
         ("In which room is the next meeting?", "4")],
    ), (
        "Lentil soup for four: fry two onions and a carrot in oil for five minutes. Add 250 g of lentils, a teaspoon"
        " of cumin and 1.2 litres of water. Simmer 20 minutes, then season with salt and the juice of a lemon. It keeps"
        " three days in a refrigerator.",
        [("How many onions are needed?", "two|2"), ("Which spice is added besides salt?", "cumin"),
         ("How long does it simmer?", "20"), ("Which juice is added?", "lemon"),
         ("How many people is it for?", "four|4")],
    ), (
        "name,city,born,role\nLiv Aas,Bergen,1974,pilot\nOmar Haddad,Tunis,1988,baker\nJun Mori,Osaka,1969,surgeon\n"
        "Eva Dvorak,Brno,1991,welder\nPaul Kamau,Nakuru,1980,judge",
        [("What is the role of Jun Mori?", "surgeon"), ("In which city does Eva Dvorak live?", "Brno"),
         ("Who is the baker?", "Omar"), ("Who was born in 1974?", "Liv"), ("When was Paul Kamau born?", "1980")],
    ), (
        "The bridge of Varn was built of larch in 1782, after a flood had taken the older one. It has five spans, of"
        " which the middle one, 31 metres long, could be drawn up for rafts. Its builder, Mattis Rohn, was once a"
        " clockmaker. In 1944 it burnt; what stands today is a copy of 1951, with oak in place of larch.",
        [("Of which wood was the old bridge built?", "larch"), ("How many spans does it have?", "five|5"),
         ("Who built it?", "Rohn"), ("What was he before?", "clockmaker"), ("When did it burn?", "1944")],
    ),
]  # fmt: skip


def main() -> None:
    path = make_parser(__doc__, "model", threads=False).parse_args().model
    tasks = [(text, question, expected) for text, asked in TEXTS for question, expected in asked]
    orders = {"text first": "{text}\n\n{question}", "question first": "{question}\n\n{text}"}
    right = dict[str, list[bool]]()
    with localllm.open(path, context=2048, cache=False) as model:
        for name, order in orders.items():
            prompts = [
                [{"role": "user", "content": order.format(text=text, question=question)}] for text, question, _ in tasks
            ]
            answers = [answer.text for answer in model.map(prompts, max_tokens=32, temperature=0)]
            right[name] = [
                bool(re.search(rf"(?<![\w.])(?:{expected})(?!\w)", answer, re.IGNORECASE))
                for answer, (_, _, expected) in zip(answers, tasks, strict=True)
            ]
            print(f"{name}: {sum(right[name])} of {len(tasks)} right", flush=True)
            for answer, (_, question, expected), good in zip(answers, tasks, right[name], strict=True):
                if not good:
                    print(f"    {question} ({expected}): {' '.join(answer.split())}", flush=True)
    first, second = right.values()
    only = [
        sum(one and not other for one, other in zip(*pair, strict=True)) for pair in ((first, second), (second, first))
    ]
    differing = sum(only)
    tail = sum(comb(differing, number) for number in range(min(only) + 1)) / 2**differing
    print(f"right only so: {only[0]} and {only[1]}; p = {min(1, 2 * tail):.2f} (McNemar, exact)")
