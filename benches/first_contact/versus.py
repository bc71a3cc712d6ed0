#!/usr/bin/env python3
"""Evenkeel's CUDA engine and the PyTorch peer on the same shapes.

    versus.py peer PROGRAMS              the peer alone, some sizes of micro-batch
    versus.py pairs PROGRAMS             A B A B, and the ratio of tokens/s
    versus.py long PROGRAMS              A B with long sequences
    versus.py child SCRIPT ARGUMENTS…    the peer, then a line with its peak memory

PROGRAMS is the directory of `gpu` and pytorch_llama.py.

Both train on random tokens with AdamW, clip the gradient's norm and wait for the device. Quote the median ratio.
nvidia-smi reads the clock and the power meanwhile; tokens per joule are those of the seconds of full load.
With --tiny the peer runs on the CPU: the ratio means nothing.
"""
import argparse, json, os, runpy, shutil, statistics, subprocess, sys

SHAPES = {
    "tinyllama": dict(layers=22, width=2048, heads=32, kv_heads=4, ff=5632, vocab=32000, seq=2048),
    "microllama": dict(layers=12, width=1024, heads=16, kv_heads=4, ff=5632, vocab=32000, seq=2048),
    "tiny": dict(layers=2, width=24, heads=4, kv_heads=2, ff=20, vocab=30, seq=40),
}

if len(sys.argv) > 2 and sys.argv[1] == "child":
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    import torch
    if torch.cuda.is_available():
        print(json.dumps(dict(peak_bytes=torch.cuda.max_memory_allocated(),
                              reserved_bytes=torch.cuda.max_memory_reserved())))
    sys.exit()

p = argparse.ArgumentParser()
p.add_argument("mode", choices=["peer", "pairs", "long"])
p.add_argument("programs")
p.add_argument("--tiny", action="store_true")
a = p.parse_args()
steps, pairs = (2, 1) if a.tiny else (15, 1 if a.mode == "long" else 2)


def run(command, environment=None):
    """The JSON lines of a command as one object; None after a failure, whose end is printed."""
    smi = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw.instant", "--format=csv,noheader,nounits", "-lms", "100"]
    sampler = None
    if shutil.which(smi[0]) and not a.tiny:
        sampler = subprocess.Popen(smi, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=170)
    except subprocess.TimeoutExpired:
        print(f"no end after 170 s: {command}", flush=True)
        return None
    finally:
        samples = ""
        if sampler:
            sampler.terminate()
            samples = sampler.communicate()[0]
    found = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    if done.returncode or "tokens_per_second" not in found:
        print(f"{command} ended with {done.returncode}:\n{done.stdout[-500:]}{done.stderr[-1500:]}", flush=True)
        return None
    return found | load(samples, found["tokens_per_second"])


def load(samples, tokens_per_second):
    """The clock and the power under full load, from the lines of nvidia-smi."""
    pairs = [line.split(",") for line in samples.splitlines()]
    pairs = [(float(clock), float(watts)) for clock, watts in (p for p in pairs if len(p) == 2)]
    most = max((watts for _, watts in pairs), default=0)
    # Pauses and compilation take far less.
    full = [(clock, watts) for clock, watts in pairs if watts > 0.8 * most]
    if len(full) < 5:
        return {}
    clock, watts = (statistics.median(values) for values in zip(*full))
    return dict(sm_mhz=clock, watts=watts, tokens_per_joule=tokens_per_second / watts)


def peer(model, batch, seq=None):
    shape = SHAPES[model] | ({"seq": seq} if seq else {})
    words = [word for key, value in shape.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    words += ["--micro-batch", str(batch), "--steps", str(steps), "--warmup", "1" if a.tiny else "5"]
    if not a.tiny:
        words += ["--device", "cuda", "--bf16", "--compile"]
    # The peer finds CUDA itself; the emulated GPU's directory would hide it.
    environment = dict(os.environ)
    if a.tiny:
        environment.pop("LD_LIBRARY_PATH", None)
    found = run([sys.executable, __file__, "child", f"{a.programs}/pytorch_llama.py", *words], environment)
    if found:
        found = dict(result="peer", model=model, micro_batch=batch, seq=shape["seq"]) | found
        print(json.dumps(found), flush=True)
    return found


def own(model, batch, seq=None):
    found = run([f"{a.programs}/gpu", "speed", "--cache", f"{a.programs}/cache", "--model", model, "--batch",
                 str(batch), "--seq", str(seq or SHAPES[model]["seq"]), "--steps", str(steps),
                 "--warmup", "1" if a.tiny else "3"])
    if found:
        print(json.dumps(found), flush=True)
    return found


failed = False
if a.mode == "peer":
    sizes = [("tiny", 2)] if a.tiny else [("tinyllama", 8), ("microllama", 16), ("tinyllama", 4)]
    for model, batch in sizes:
        failed |= peer(model, batch) is None
else:
    cases = [("tinyllama", 8, 2048), ("microllama", 16, 2048)]
    if a.mode == "long":
        cases = [("tinyllama", 2, 8192), ("tinyllama", 1, 32768)]
    for model, batch, seq in [("tiny", 2, 40)] if a.tiny else cases:
        ratios, memory = [], []
        for _ in range(pairs):
            ours, theirs = own(model, batch, seq), peer(model, batch, seq)
            if not ours or not theirs:
                failed = True
                continue
            assert ours["parameters"] == theirs["parameters"], (ours, theirs)
            ratios.append(ours["tokens_per_second"] / theirs["tokens_per_second"])
            if "peak_bytes" in theirs:
                memory.append(ours["engine_peak_bytes"] / theirs["peak_bytes"])
        if ratios:
            print(json.dumps(dict(result="ratio", model=model, micro_batch=batch, seq=seq, pairs=len(ratios),
                                  median_ratio=statistics.median(ratios), lowest=min(ratios), highest=max(ratios),
                                  memory_ratio=statistics.median(memory) if memory else None)), flush=True)
sys.exit(failed)
