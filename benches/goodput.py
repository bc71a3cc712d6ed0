#!/usr/bin/env python3
"""What is trained in spite of faults: three ranks on this machine, one of them killed (SIGKILL) every 60 s.

Goodput: the samples of a time, divided by those of an undisturbed run of the same program in the same time. Both are counted
from the end of the first step of three ranks to the end of the last step. A step that is trained again counts once.

Evenkeel with one process that stands by (`elasticity.spares`), torchrun's elastic agent, which starts all ranks again from a
checkpoint of every five steps, and torchft with a supervisor that starts a killed replica again at once. All train an 8.43 M
parameter Llama (recovery.json) with a global batch of 12 sequences of 64 tokens, 1,000 steps. Prints one JSON line a run,
first undisturbed and then with faults, and one with the ratio.

    cargo build --release
    python3 benches/goodput.py --program evenkeel
    python3 benches/goodput.py --program torchrun --python target/python/bin/python           # needs torch
    target/python/bin/python -m pip install --target /tmp/torchft --no-deps torchft==0.2.0
    target/python/bin/python -m pip install --target /tmp/torchft opentelemetry-sdk opentelemetry-exporter-otlp-proto-http
    python3 benches/goodput.py --program torchft --python target/python/bin/python --torchft /tmp/torchft
"""
import argparse, json, os, pathlib, random, re, shutil, signal, socket, subprocess, sys, tempfile, time

here = pathlib.Path(__file__).resolve().parent
p = argparse.ArgumentParser()
p.add_argument("--program", choices=["evenkeel", "torchrun", "torchft"], help="only this one")
p.add_argument("--binary", default=str(here.parent / "target/release/evenkeel"))
p.add_argument("--python", default=sys.executable, help="the Python that has torch")
p.add_argument("--torchft", default="/tmp/torchft", help="the folder into which pip installed torchft")
p.add_argument("--steps", type=int, default=1000)
p.add_argument("--every", type=float, default=60, help="seconds between two faults; 0: only the undisturbed run")
p.add_argument("--seed", type=int, default=1, help="chooses the ranks that are killed")
p.add_argument("--limit", type=float, default=3600, help="seconds after which a run ends with the steps that it has")
a = p.parse_args()

BATCH, RANKS = 12, 3
# torchft finds a peer that is gone after 2 s. Its default is 5 s.
HEARTBEAT = 2


class Lines:
    """The records of a file to which others append."""

    def __init__(self, path):
        self.path, self.read = path, 0

    def new(self):
        try:
            with self.path.open("rb") as file:
                file.seek(self.read)
                whole = file.read().rpartition(b"\n")[0]
        except FileNotFoundError:
            return []
        self.read += len(whole) + 1 if whole else 0
        found = []
        for line in whole.splitlines():
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                pass
        return found


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def pids(*pattern):
    output = subprocess.run(["pgrep", *pattern], capture_output=True, text=True).stdout
    return [int(pid) for pid in output.split()]


def kill(pid):
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


class Program:
    """A program in a folder of its own. `again`: how many processes the supervisor here has started again."""

    again = None

    def __init__(self, directory):
        self.directory, self.processes = directory, []

    def environment(self):
        """On loopback, with all temporary files in the folder."""
        return os.environ | {"GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(self.directory)}

    def start(self, words, **options):
        with (self.directory / "output").open("ab") as output:
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, **options)
        self.processes.append(process)
        return process

    def tend(self):
        gone = [process for process in self.processes if process.poll() is not None]
        if gone:
            raise SystemExit(f"{gone[0].args[0]} has ended with {gone[0].returncode}:\n" + self.output()[-3000:])

    def output(self):
        return (self.directory / "output").read_text(errors="replace")

    def end(self):
        # Children that outlive their parent are found before it is killed.
        ranks = self.all_ranks()
        for process in self.processes:
            process.kill()
            process.wait()
        for _ in range(50):
            for pid in ranks:
                kill(pid)
            ranks = self.all_ranks()
            if not ranks:
                return
            time.sleep(0.1)


class Evenkeel(Program):
    def begin(self):
        recipe, self.run = self.directory / "recipe.json", self.directory / "run"
        content = json.loads((here / "recovery.json").read_text())
        content["spec"]["budget"]["samples"] = BATCH * a.steps
        content["spec"]["elasticity"] = {"spares": 1}
        recipe.write_text(json.dumps(content))
        self.files = []
        self.start([a.binary, "launch", str(recipe), "--procs", str(RANKS), "--out", str(self.run)])

    def tend(self):
        # The launcher ends with the budget, and all steps are then in the files.
        if self.processes[0].poll() != 0:
            super().tend()

    def records(self):
        while (path := self.run / f"gen-{len(self.files) + 1}/metrics.jsonl").exists():
            self.files.append(Lines(path))
        found = [record for file in self.files for record in file.new() if record.get("kind") == "step"]
        return [(r["time"], r["samples"], r["world"]) for r in found]

    def ranks(self):
        """Those of the newest generation that has any. A process that stands by writes into another log."""
        places = {}
        for pid in self.all_ranks():
            try:
                log = os.readlink(f"/proc/{pid}/fd/2")
            except OSError:
                continue
            if place := re.fullmatch(re.escape(str(self.run)) + r"/gen-(\d+)/logs/rank-(\d+)\.log", log):
                places[int(place[1]), int(place[2])] = pid
        newest = max((generation for generation, _ in places), default=None)
        return [pid for (generation, _), pid in sorted(places.items()) if generation == newest]

    def all_ranks(self):
        return pids("-f", f" rank --run {self.run} ")


class Torchrun(Program):
    def environment(self):
        # Otherwise the agent of PyTorch 2.15 gives restarted ranks the store of those before, in which gloo finds their addresses:
        # two ranks then wait for ever for a connection.
        return super().environment() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    def begin(self):
        self.log = self.directory / "steps.jsonl"
        self.file, port = Lines(self.log), free_port()
        self.start([a.python, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc_per_node={RANKS}",
                    "--max_restarts=100000", "--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}", "--rdzv_id=goodput",
                    "--local_addr=127.0.0.1", str(here / "recovery_peer.py"), str(self.log)], env=self.environment())

    def records(self):
        # A step counts as one of the global batch, also if it is trained again.
        return [(r["time"], r["step"] * BATCH, r["world"]) for r in self.file.new()]

    def ranks(self):
        return pids("-P", str(self.processes[0].pid), "-f", str(self.log))

    def all_ranks(self):
        agent = self.processes[0].pid
        return [pid for pid in pids("-f", f"recovery_peer.py {self.log}") if pid != agent]


class Torchft(Program):
    again = 0

    def environment(self):
        return super().environment() | {"PYTHONPATH": a.torchft}

    def begin(self):
        self.log = self.directory / "steps.jsonl"
        self.file = Lines(self.log)
        port = free_port()
        self.address = f"http://127.0.0.1:{port}"
        lighthouse = str(pathlib.Path(a.torchft, "bin/torchft_lighthouse"))
        self.start([a.python, lighthouse, "--bind", f"127.0.0.1:{port}", "--min_replicas", "1",
                    "--heartbeat_timeout_ms", str(1000 * HEARTBEAT)], env=self.environment())
        while socket.socket().connect_ex(("127.0.0.1", port)) != 0:
            super().tend()
            time.sleep(0.05)
        self.replicas = [self.replica(number) for number in range(RANKS)]

    def replica(self, number):
        words = [a.python, str(here / "goodput_torchft.py"), str(self.log), self.address, str(number)]
        return self.start(words, env=self.environment())

    def tend(self):
        for number, process in enumerate(self.replicas):
            if process.poll() is not None:
                if not self.file.read:
                    super().tend()
                self.again += 1
                self.processes.remove(process)
                self.replicas[number] = self.replica(number)
        super().tend()

    def records(self):
        return [(r["time"], r["samples"], r["world"]) for r in self.file.new()]

    def ranks(self):
        return [process.pid for process in self.replicas if process.poll() is None]

    def all_ranks(self):
        return pids("-f", f"goodput_torchft.py {self.log} ")


def measured(name, every):
    chance = random.Random(a.seed)
    directory = pathlib.Path(tempfile.mkdtemp())
    program = dict(evenkeel=Evenkeel, torchrun=Torchrun, torchft=Torchft)[name](directory)
    first, last, pause, again, kills, next_victim = None, None, 0, 0, 0, chance.randrange(RANKS)
    begun = time.time()
    try:
        program.begin()
        while time.time() < begun + a.limit and not (last and last[1] >= BATCH * a.steps):
            time.sleep(0.1)
            program.tend()
            for moment, samples, world in program.records():
                if first is None:
                    if world == RANKS:
                        first = last = (moment, samples)
                elif samples > last[1]:
                    pause = max(pause, moment - last[0])
                    last = (moment, samples)
                else:
                    again += 1
            if every and first and time.time() >= first[0] + every * (kills + 1):
                ranks = program.ranks()
                # A rank that is not there yet is killed when it is.
                if len(ranks) == RANKS:
                    kill(ranks[next_victim])
                    kills, next_victim = kills + 1, chance.randrange(RANKS)
        if not last or last[0] == first[0]:
            raise SystemExit(f"{name}: not two steps in {a.limit:g} s\n" + program.output()[-3000:])
        # A run that hangs until the limit has trained nothing since its last step.
        end = last[0] if last[1] >= BATCH * a.steps else time.time()
        samples, seconds = last[1] - first[1], end - first[0]
        result = dict(who=name, every=every, kills=kills, samples=samples, seconds=round(seconds, 1),
                      samples_per_second=round(samples / seconds, 3), longest_pause=round(pause, 2), steps_again=again)
        if program.again is not None:
            result["started_again"] = program.again
        if last[1] < BATCH * a.steps:
            result["ended_by"] = "limit"
        return result
    finally:
        program.end()
        shutil.rmtree(directory, ignore_errors=True)


def end(number, _):
    for one in ENDING:
        signal.signal(one, signal.SIG_IGN)
    raise SystemExit(128 + number)


ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
for number in ENDING:
    signal.signal(number, end)
for name in [a.program] if a.program else ["evenkeel", "torchrun", "torchft"]:
    undisturbed = measured(name, 0)
    print(json.dumps(undisturbed), flush=True)
    if not a.every:
        continue
    faults = measured(name, a.every)
    print(json.dumps(faults), flush=True)
    rate = undisturbed["samples_per_second"]
    lost = faults["seconds"] - faults["samples"] / rate
    print(json.dumps(dict(who=name, goodput=round(faults["samples_per_second"] / rate, 4), kills=faults["kills"],
                          seconds_lost_a_kill=round(lost / faults["kills"], 2) if faults["kills"] else None)), flush=True)
