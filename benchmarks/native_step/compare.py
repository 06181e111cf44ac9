"""The layers of a step by compiled Python and by C++, in turns."""
from __future__ import annotations
import ctypes, math, sys, time, statistics
import numpy as np, torch
from kernels.cpu.layers.layer_stack import LayerStack, LayerWeights, StackStep
from kernels.cpu.layers.layer_workspace import StackShape
from kernels.cpu.products.layer_product import Product
from kernels.cpu.products.packed_weight import pack
from kernels.int8_weight import quantize_int8, pack_int8

lib = ctypes.CDLL("/tmp/native.so")
I = np.int64
PRODUCT = np.dtype([("kind", I), ("num_in", I), ("num_out", I), ("weight", I), ("scale", I)])
LAYER = np.dtype([("input_norm", I), ("mlp_norm", I), ("key_cache", I), ("value_cache", I), ("qkv", PRODUCT), ("out", PRODUCT), ("mlp_in", PRODUCT), ("mlp_out", PRODUCT)])
STEP = np.dtype([(n, I) for n in "rows num_sequences num_layers hidden intermediate num_heads num_kv_heads head_size block_size max_blocks positions slots block_tables seq_lens query_starts cos_sin residual".split()] + [("eps", np.float64)])
SHAPES = {"tiny": (576, 1536, 9, 3, 64, 1), "smollm2-135m": (576, 1536, 9, 3, 64, 30), "qwen3-0.6b": (1024, 3072, 16, 8, 128, 28), "llama-3.2-1b": (2048, 8192, 32, 8, 64, 16)}

def native_weight(w, kind):
    out, size = w.shape
    if kind == 0:
        p = w.float().view(out // 16, 16, size).transpose(1, 2).contiguous()
        return p, None
    if kind in (1, 2):
        p = w.bfloat16().view(out // 16, 16, size // 2, 2).transpose(1, 2).contiguous()
        return p, None
    q, s = quantize_int8(w)
    p = (q.view(torch.uint8) ^ 128).view(out // 16, 16, size // 4, 4).transpose(1, 2).contiguous()
    return p, s.contiguous()

def interleave(w):  # gate and up take turns, 16 outputs at a time
    g, u = w.chunk(2)
    return torch.stack([g.view(-1, 16, w.shape[1]), u.view(-1, 16, w.shape[1])], 1).reshape(w.shape)

class Native:
    def __init__(self, shape, weights, kind, caches, cos_sin):
        self.keep, self.shape, self.cos_sin = [], shape, cos_sin
        self.layers = np.zeros(len(weights), LAYER)
        for rec, w, (k, v) in zip(self.layers, weights, caches):
            for name in ("qkv", "out", "mlp_in", "mlp_out"):
                p, s = native_weight(interleave(w[name]) if name == "mlp_in" else w[name], kind)
                self.keep += [p, s]
                rec[name] = (kind, w[name].shape[1], w[name].shape[0], p.data_ptr(), 0 if s is None else s.data_ptr())
                if name == "mlp_in" and s is not None:
                    pass
            rec["input_norm"], rec["mlp_norm"] = w["input_norm"].data_ptr(), w["mlp_norm"].data_ptr()
            rec["key_cache"], rec["value_cache"] = k.data_ptr(), v.data_ptr()
    def __call__(self, residual, step):
        h, inter, nh, nkv, d, n = self.shape
        s = np.zeros(1, STEP)
        s[0] = (residual.shape[0], len(step.seq_lens), n, h, inter, nh, nkv, d, 16, step.block_tables.shape[1], step.positions.data_ptr(), step.slot_mapping.data_ptr(), step.block_tables.data_ptr(), step.seq_lens.data_ptr(), step.query_starts.data_ptr(), self.cos_sin.data_ptr(), residual.data_ptr(), 1e-5)
        lib.octavo_run(ctypes.c_void_p(s.ctypes.data), ctypes.c_void_p(self.layers.ctypes.data))
        return residual

def stack(shape, weights, kind, cos_sin):
    h, inter, nh, nkv, d, n = shape
    def product(w):
        if kind == 3:
            q, s = quantize_int8(w)
            return Product.of_int8(pack_int8(q), s, None, w.shape[1])
        return Product.of_floats(pack(w.float()), None, *w.shape)
    layers = [LayerWeights(w["input_norm"], product(w["qkv"]), cos_sin, 1 / math.sqrt(d), 0, product(w["out"]), w["mlp_norm"], product(w["mlp_in"]), product(w["mlp_out"])) for w in weights]
    return LayerStack(StackShape(h, inter, nh, nkv, d, 1e-5, 0.0, 0.0), layers)

def step_of(rows, seq_len, prompt):
    n = 1 if prompt else rows
    blocks = -(-seq_len // 16)
    tables = torch.randperm(n * blocks).int().view(n, blocks).contiguous()
    if prompt:
        pos = torch.arange(rows); slots = tables[0].long()[pos // 16] * 16 + pos % 16
        return StackStep(pos, slots, tables, torch.tensor([rows], dtype=torch.int32), torch.tensor([0, rows], dtype=torch.int32))
    pos = torch.full((rows,), seq_len - 1)
    return StackStep(pos, tables[:, -1].long() * 16 + (seq_len - 1) % 16, tables, torch.full((rows,), seq_len, dtype=torch.int32), torch.arange(rows + 1, dtype=torch.int32))

def main():
    threads = int(sys.argv[1]); names = sys.argv[2].split(","); rounds = int(sys.argv[3]); kinds = [int(k) for k in sys.argv[4].split(",")]
    torch.set_num_threads(threads); lib.octavo_start(threads); torch.manual_seed(0)
    for name in names:
        shape = h, inter, nh, nkv, d, n = SHAPES[name]
        weights = [dict(input_norm=torch.ones(h), mlp_norm=torch.ones(h), qkv=(torch.randn((nh + 2 * nkv) * d, h) / h**.5).bfloat16(), out=(torch.randn(h, nh * d) / (nh * d)**.5).bfloat16(), mlp_in=(torch.randn(2 * inter, h) / h**.5).bfloat16(), mlp_out=(torch.randn(h, inter) / inter**.5).bfloat16()) for _ in range(n)]
        caches = [(torch.randn(32 * 17, nkv, 16, d), torch.randn(32 * 17, nkv, 16, d)) for _ in range(n)]
        angles = torch.arange(4096)[:, None] * 10000.0 ** (-torch.arange(d // 2) / (d // 2))
        cos_sin = torch.cat([angles.cos(), angles.sin()], 1).contiguous()
        old_f, old_8 = (stack(shape, weights, k, cos_sin) for k in (1, 3))
        for kind in kinds:
            new = Native(shape, weights, kind, caches, cos_sin)
            if kind == 3:  # scales of gate and up take turns, too
                new = Native(shape, weights, kind, caches, cos_sin)
            old = old_8 if kind == 3 else old_f
            for rows, seq_len, prompt in ((1, 256, False), (8, 256, False), (32, 256, False), (256, 256, True)):
                step = step_of(rows, seq_len, prompt)
                start = torch.randn(rows, h)
                a, b = old(start.clone(), caches, step, torch.arange(rows))
                want, got = a + b, new(start.clone(), step)
                error = ((want - got).abs().max() / want.abs().max()).item()
                times = {"old": [], "new": []}
                for _ in range(rounds):
                    for which in times:
                        x = start.clone(); t = time.perf_counter()
                        if which == "old": old(x, caches, step, torch.arange(rows))
                        else: new(x, step)
                        times[which].append((time.perf_counter() - t) * 1e3)
                o, w = (statistics.median(t) for t in times.values())
                print(f"{name} kind {kind} rows {rows}: old {o:.2f} ({min(times['old']):.2f}) new {w:.2f} ({min(times['new']):.2f}) ms, ratio {o / w:.2f} of minima {min(times['old'])/min(times['new']):.2f}, error {error:.1e}", flush=True)
main()
