"""The pictures of docs/early-vllm.md: what each idea of early vLLM became here."""

from __future__ import annotations

from docs.drawing import GONE, PLAIN, SCHEDULER, SHARED, WORKER, Drawing


def pictures() -> dict[str, str]:
    """SVG by file name."""
    return {
        "idea-llm-engine.svg": _llm_engine().svg(),
        "idea-async-engine.svg": _async_engine().svg(),
        "idea-scheduler.svg": _scheduler().svg(),
        "idea-block-manager.svg": _block_manager().svg(),
        "idea-cache-engine.svg": _cache_engine().svg(),
        "idea-worker.svg": _worker().svg(),
        "idea-sequence-group.svg": _sequence_group().svg(),
        "idea-paged-attention.svg": _paged_attention().svg(),
        "idea-sampler.svg": _sampler().svg(),
    }


def _llm_engine() -> Drawing:
    drawing = Drawing(700, 190, "The step loop: events come in, steps go out to workers, answers become tokens")
    drawing.frame(130, 20, 330, 150, "step loop, one thread", SCHEDULER)
    for x, text in ((146, "place"), (252, "schedule"), (358, "encode")):
        drawing.box(x, 52, 86, 34, text)
    drawing.arrow((232, 69), (252, 69))
    drawing.arrow((338, 69), (358, 69))
    drawing.box(252, 118, 192, 34, "take the answer")
    drawing.box(16, 52, 84, 34, "requests")
    drawing.arrow((100, 69), (146, 69))
    for i in range(3):
        drawing.box(560, 30 + 46 * i, 120, 36, f"worker {i + 1}", WORKER)
    drawing.arrow((444, 69), (556, 69), text="steps")
    drawing.arrow((556, 135), (444, 135), text="answers")
    drawing.box(16, 118, 84, 34, "outputs")
    drawing.arrow((252, 135), (100, 135), text="tokens")
    return drawing


def _async_engine() -> Drawing:
    drawing = Drawing(700, 170, "Streams are served on an event loop, steps are decided on a thread of their own")
    drawing.frame(16, 20, 260, 130, "event loop", SCHEDULER)
    drawing.box(32, 52, 228, 36, "check, tokenise (short texts)")
    drawing.box(32, 100, 228, 36, "a stream for each client")
    drawing.frame(424, 20, 260, 130, "step loop", SCHEDULER)
    drawing.box(440, 52, 228, 36, "queues, blocks, steps")
    drawing.box(440, 100, 228, 36, "tokens of the last answer")
    drawing.arrow((260, 70), (440, 70), text="submit")
    drawing.arrow((440, 118), (260, 118), text="mailboxes")
    return drawing


def _scheduler() -> Drawing:
    drawing = Drawing(700, 200, "Waiting groups begin, running ones are preempted by swapping or by recomputing")
    drawing.box(16, 70, 90, 46, "arrives")
    drawing.box(190, 60, 130, 66, "waiting", SCHEDULER)
    drawing.box(460, 60, 130, 66, "running", SCHEDULER)
    drawing.box(460, 150, 130, 38, "swapped", SCHEDULER)
    drawing.arrow((106, 93), (190, 93))
    drawing.arrow((320, 80), (460, 80), text="slot and blocks free")
    drawing.arrow((460, 110), (320, 110), text="preempted, recompute")
    drawing.arrow((500, 126), (500, 150))
    drawing.arrow((550, 150), (550, 126))
    drawing.words(600, 143, "swap", small=True)
    drawing.arrow((590, 93), (684, 93), text="finished")
    drawing.words(255, 45, "one queue for each worker, one for none", middle=True, small=True)
    drawing.words(525, 45, "columns by slot", middle=True, small=True)
    return drawing


def _block_manager() -> Drawing:
    drawing = Drawing(700, 220, "Two sequences share two blocks; the third is copied when one of them writes into it")
    drawing.words(16, 42, "sequence A")
    drawing.cells(110, 24, ["7", "2", "9"])
    drawing.words(16, 192, "sequence B, a fork of A")
    drawing.cells(190, 174, ["7", "2", "4"])
    drawing.words(420, 18, "device blocks, with how many use each", small=True)
    kinds = {2: (SHARED, "2"), 4: (WORKER, "1"), 7: (SHARED, "2"), 9: (WORKER, "1")}
    for block in range(10):
        kind, uses = kinds.get(block, (GONE, ""))
        x, y = 420 + 54 * (block % 5), 30 + 62 * (block // 5) + 20
        drawing.box(x, y, 46, 40, f"{block}\n{uses}" if uses else f"{block}", kind)
    drawing.arrow((242, 38), (400, 60))
    drawing.arrow((322, 188), (400, 150))
    drawing.words(420, 192, "green: shared. So was 9, until B wrote into it:", small=True)
    drawing.words(420, 207, "9 was copied to 4 first (copy on write)", small=True)
    return drawing


def _cache_engine() -> Drawing:
    drawing = Drawing(700, 170, "Blocks on the device and on the host, and what moves between them")
    drawing.frame(16, 20, 270, 130, "device: layers x (keys, values)", WORKER)
    drawing.cells(40, 56, ["0", "1", "2", "3", "..."], width=44)
    drawing.frame(414, 20, 270, 130, "host memory", WORKER)
    drawing.cells(438, 56, ["0", "1", "2", "3", "..."], width=44)
    drawing.arrow((262, 64), (438, 64), text="swap out")
    drawing.arrow((438, 78), (262, 78))
    drawing.words(350, 96, "swap in", middle=True, small=True)
    drawing.arrow((62, 84), (62, 112), (150, 112), (150, 84))
    drawing.words(106, 130, "copy on write", middle=True, small=True)
    return drawing


def _worker() -> Drawing:
    drawing = Drawing(700, 190, "A worker applies what the scheduler decided to its mirror, computes, and answers")
    drawing.box(16, 60, 110, 60, "scheduler", SCHEDULER)
    drawing.frame(230, 20, 454, 150, "worker", WORKER)
    for x, text in ((246, "mirror:\nsequences by slot"), (396, "model:\nlayers and cache"), (546, "sampler")):
        drawing.box(x, 54, 126, 50, text)
    drawing.arrow((372, 79), (396, 79))
    drawing.arrow((522, 79), (546, 79))
    drawing.arrow((126, 79), (246, 79))
    drawing.words(178, 73, "what changed", middle=True, small=True)
    drawing.arrow((608, 104), (608, 140), (70, 140), (70, 120))
    drawing.words(178, 134, "4 bytes a token", middle=True, small=True)
    drawing.words(330, 160, "two steps on their way: one is computed while the next arrives", small=True)
    return drawing


def _sequence_group() -> Drawing:
    drawing = Drawing(700, 180, "A group is a request: one prompt, computed once, and the sequences forked from it")
    drawing.frame(130, 16, 440, 150, "SequenceGroup: parameters, seed, tenant", SCHEDULER)
    drawing.box(150, 76, 130, 40, "prompt", SHARED)
    for i in range(3):
        drawing.box(390, 46 + 38 * i, 160, 32, f"Sequence {i}")
        drawing.arrow((280, 96), (390, 62 + 38 * i))
    drawing.words(330, 52, "fork", middle=True, small=True)
    drawing.box(16, 76, 84, 40, "request")
    drawing.arrow((100, 96), (150, 96))
    for i in range(3):
        drawing.arrow((550, 62 + 38 * i), (620, 62 + 38 * i))
    drawing.words(626, 66, "output 0")
    drawing.words(626, 104, "output 1")
    drawing.words(626, 142, "output 2")
    return drawing


def _paged_attention() -> Drawing:
    drawing = Drawing(700, 190, "A query reads keys and values of its sequence through its block table")
    drawing.words(16, 34, "query of position 37")
    drawing.box(16, 44, 130, 34, "q", PLAIN)
    drawing.words(220, 34, "block table")
    drawing.cells(220, 44, ["7", "2", "9"])
    drawing.words(440, 34, "cache: blocks of 16 tokens, anywhere", small=True)
    drawing.cells(440, 44, ["0", "1", "2", "3", "4"], width=46)
    drawing.cells(440, 84, ["5", "6", "7", "8", "9"], width=46)
    drawing.box(532, 44, 46, 28, "2", SHARED)
    drawing.box(532, 84, 46, 28, "7", SHARED)
    drawing.box(624, 84, 46, 28, "9", SHARED)
    drawing.arrow((146, 61), (220, 61))
    drawing.arrow((352, 61), (440, 61))
    drawing.words(16, 150, "scores = scale q . k over positions 0 to 15 in block 7, 16 to 31 in block 2, 32 to 37 in 9")
    drawing.words(16, 172, "out = softmax(scores) . v, tile by tile: no row of scores is ever whole in memory")
    return drawing


def _sampler() -> Drawing:
    drawing = Drawing(700, 170, "Logits are adjusted, divided by the temperature, cut off, and drawn from")
    texts = ("logits", "forbid, bias,\npenalties", "divide by\ntemperature", "min-p, top-k,\ntop-p", "draw")
    for i, text in enumerate(texts):
        drawing.box(16 + 138 * i, 30, 112, 50, text, WORKER if i else PLAIN)
        if i:
            drawing.arrow((138 * i - 10, 55), (138 * i + 16, 55))
    drawing.box(16, 112, 112, 40, "logprobs")
    drawing.arrow((72, 80), (72, 112))
    drawing.box(430, 112, 254, 40, "hash(seed, output, position)")
    drawing.arrow((624, 112), (624, 80))
    return drawing
