//! Milliseconds of the three collectives over loopback, one process per rank: `cargo bench --bench collective
//! -- [world] [elements]`; 2 ranks and 33.7 MB by default. With `--tcp` vectors do not use the Unix sockets
//! of ranks on one host. `benches/gloo_peer.py` measures PyTorch's Gloo in the same way.

use std::net::TcpListener;
use std::process::Command;
use std::time::Instant;

use evenkeel::comm::tcp::{Greeting, TcpOptions, connect};
use evenkeel::comm::{Collective, CommError, Kind, Operation};

/// Holds the rank of a child process.
const VARIABLE: &str = "EVENKEEL_BENCH_RANK";

const ROUNDS: usize = 15;

fn main() -> anyhow::Result<()> {
    let (mut numbers, mut unix_sockets) = (Vec::new(), true);
    for argument in std::env::args().skip(1) {
        match argument.as_str() {
            // cargo adds this argument.
            "--bench" => {}
            "--tcp" => unix_sockets = false,
            number => numbers.push(number.parse::<usize>()?),
        }
    }
    let world = numbers.first().copied().unwrap_or(2);
    let elements = numbers.get(1).copied().unwrap_or(8_425_728);
    if let Ok(role) = std::env::var(VARIABLE) {
        let (rank, port) = role.split_once(' ').unwrap_or_default();
        let greeting = Greeting {
            rank: rank.parse()?,
            world,
        };
        let mut options = TcpOptions::new(
            "127.0.0.1",
            port.parse()?,
            greeting,
            "0".repeat(64).parse()?,
        );
        options.unix_sockets = unix_sockets;
        return measure(&options, elements - elements % world);
    }
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let start = |rank: usize| {
        Command::new(std::env::current_exe()?)
            .args(std::env::args().skip(1))
            .env(VARIABLE, format!("{rank} {port}"))
            .spawn()
    };
    let children: Vec<_> = (0..world).map(start).collect::<Result<_, _>>()?;
    for mut child in children {
        anyhow::ensure!(child.wait()?.success(), "a rank failed");
    }
    Ok(())
}

fn measure(options: &TcpOptions, elements: usize) -> anyhow::Result<()> {
    let Greeting { rank, world } = options.greeting;
    let collective = connect(options)?;
    let data = || vec![1.0; elements];
    let shard = || vec![1.0; elements / world];
    let operations = [
        Operation::all_reduce(data()),
        Operation {
            kind: Kind::ReduceScatter,
            data: data(),
            shard: shard(),
        },
        Operation {
            kind: Kind::AllGather,
            data: data(),
            shard: shard(),
        },
    ];
    for operation in operations {
        let name = operation.kind.name();
        let times = rounds(&*collective, operation)?;
        if rank == 0 {
            println!(
                "{name:15} {:.1} MB, {world} processes: best {:.1} ms, median {:.1} ms",
                4e-6 * elements as f64,
                times[0],
                times[times.len() / 2]
            );
        }
    }
    Ok(collective.close()?)
}

/// Sorted milliseconds; all ranks begin every round together.
fn rounds(collective: &dyn Collective, mut operation: Operation) -> Result<Vec<f64>, CommError> {
    let mut times = Vec::with_capacity(ROUNDS);
    for _ in 0..ROUNDS {
        collective.exchange(&[])?;
        let begun = Instant::now();
        operation = collective.start(operation).wait()?;
        times.push(begun.elapsed().as_secs_f64() * 1e3);
        if operation.kind == Kind::AllReduce {
            operation.data.fill(1.0);
        }
    }
    times.sort_by(f64::total_cmp);
    Ok(times)
}
