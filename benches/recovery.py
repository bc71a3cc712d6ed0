#!/usr/bin/env python3
"""What a change of the world costs on one machine.

`kill`: from SIGKILL of one of three ranks to the end of the first step of the new world. `resize`: from the end of the last
step of two ranks to the begin of the first one of three, in which nothing is trained.

Evenkeel and torchrun's elastic agent side by side: an 8.43 M parameter Llama (8 layers, width 256,
8 heads, ff 688, vocabulary 4096), a global batch of 12 sequences of 64 tokens, three ranks of which
one is killed. Prints one JSON line a trial.

    cargo build --release
    python3 benches/recovery.py --trials 5
    python3 benches/recovery.py --trials 5 --change resize --against ANOTHER/evenkeel   # in turns, with the ratio
    python3 benches/recovery.py --trials 3 --peer          # the same with torchrun (needs torch)
"""
import argparse, json, os, pathlib, re, shutil, signal, socket, statistics, subprocess, sys, tempfile, time

here = pathlib.Path(__file__).resolve().parent
p = argparse.ArgumentParser()
p.add_argument("--trials", type=int, default=5)
p.add_argument("--binary", default=str(here.parent / "target/release/evenkeel"))
p.add_argument("--change", choices=["kill", "resize"], default="kill")
p.add_argument("--against", help="another build of the program, measured in turns with this one")
p.add_argument("--peer", action="store_true", help="measure torchrun instead")
p.add_argument("--python", default=sys.executable, help="the Python that has torch")
a = p.parse_args()

RECIPE = (here / "recovery.json").read_text()


def until(condition, seconds=180):
    end = time.time() + seconds
    while time.time() < end:
        found = condition()
        if found:
            return found
        time.sleep(0.005)
    raise SystemExit("waited in vain")


def steps(path):
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if record.get("kind") == "step":
            found.append(record)
    return found


def ranks_of(pattern):
    output = subprocess.run(["pgrep", "-f", pattern], capture_output=True, text=True).stdout
    return [int(pid) for pid in output.split()]


def evenkeel(binary=a.binary):
    directory = pathlib.Path(tempfile.mkdtemp())
    recipe, run = directory / "recipe.yaml", directory / "run"
    recipe.write_text(RECIPE)
    procs = "3" if a.change == "kill" else "2"
    launcher = subprocess.Popen([binary, "launch", str(recipe), "--procs", procs, "--out", str(run)],
                                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: len(steps(run / "gen-1/metrics.jsonl")) >= 10)
        killed = time.time()
        if a.change == "kill":
            os.kill(max(ranks_of(f"rank --run {run} ")), signal.SIGKILL)
        else:
            subprocess.run([binary, "resize", str(run), "3"], check=True, stdout=subprocess.DEVNULL)
        first = until(lambda: steps(run / "gen-2/metrics.jsonl"))[0]
        before = steps(run / "gen-1/metrics.jsonl")[-1]
        if a.change == "kill":
            seconds = first["time"] - killed
        else:
            seconds = first["time"] - first["seconds"] - before["time"]
        record = json.loads((run / "gen-2/record.json").read_text())
        pinned = (record.get("carried") or record["start"] or {}).get("samples", 0)
        return dict(who=binary, seconds=round(seconds, 3), world=first["world"],
                    batch=[before["batch"], first["batch"]],
                    steps_lost=max(0, (before["samples"] - pinned) // 12))
    finally:
        launcher.kill()
        launcher.wait()
        until(lambda: not ranks_of(f"rank --run {run} "))
        shutil.rmtree(directory, ignore_errors=True)


def torchrun():
    directory = pathlib.Path(tempfile.mkdtemp())
    log = directory / "steps.jsonl"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = subprocess.Popen(
        [a.python, "-m", "torch.distributed.run", "--nnodes=2:3", "--nproc_per_node=1", "--max_restarts=3",
         "--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}", "--rdzv_id=recovery", "--local_addr=127.0.0.1",
         "--rdzv_conf=join_timeout=30,last_call_timeout=1,timeout=30,keep_alive_interval=1,keep_alive_max_attempt=2",
         str(here / "recovery_peer.py"), str(log)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    # The first agent holds the rendezvous, and lives: without it nobody would come back at all.
    until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0)
    others = [subprocess.Popen(launcher.args, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for _ in range(2)]
    agents = [launcher, *others]

    def logged():
        try:
            return [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]
        except FileNotFoundError:
            return []

    try:
        until(lambda: [r for r in logged() if r["step"] >= 10])
        # A node that is gone: its agent and its rank.
        victim = agents.pop()
        children = ranks_of_parent(victim.pid)
        killed = time.time()
        victim.kill()
        for child in children:
            os.kill(child, signal.SIGKILL)
        before = logged()[-1]
        first = until(lambda: [r for r in logged() if r["world"] == 2])[0]
        return dict(who="torchrun", seconds=round(first["time"] - killed, 3), world=first["world"],
                    batch=[before["batch"], first["batch"]], steps_lost=before["step"] - first["step"] + 1)
    finally:
        for agent in agents:
            for child in ranks_of_parent(agent.pid):
                try:
                    os.kill(child, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            agent.kill()
            agent.wait()
        shutil.rmtree(directory, ignore_errors=True)


def ranks_of_parent(pid):
    output = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout
    return [int(child) for child in output.split()]


def median(results):
    print(json.dumps(dict(who=results[0]["who"], median=statistics.median(r["seconds"] for r in results),
                          worst=max(r["seconds"] for r in results))))


results, others = [], []
for _ in range(a.trials):
    results.append(torchrun() if a.peer else evenkeel())
    print(json.dumps(results[-1]), flush=True)
    if a.against:
        others.append(evenkeel(a.against))
        print(json.dumps(others[-1]), flush=True)
median(results)
if others:
    median(others)
    ratios = [one["seconds"] / other["seconds"] for one, other in zip(results, others)]
    print(json.dumps(dict(ratios=[round(ratio, 3) for ratio in ratios], median=round(statistics.median(ratios), 3))))
