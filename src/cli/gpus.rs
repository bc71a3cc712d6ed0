//! `evenkeel gpus`: the hardware and CUDA libraries found, as a table or as data.

use std::process::ExitCode;

use super::output::{self, Format};
use super::table::Table;
use crate::engine::cuda::libraries::{self, LibraryCheck};
use crate::inventory::{Devices, DriverState, Ecc, Gpu, GpuMemory, Inventory, Mig};
use crate::telemetry::human;
use crate::util::format::bytes;
use crate::util::format::count;

/// Show the GPUs, CPUs and CUDA libraries found.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  evenkeel gpus                       a table
  evenkeel gpus -o json               all data as JSON
  CUDA_VISIBLE_DEVICES=0,1 evenkeel gpus
                                      devices of a run with this setting

evenkeel searches for CUDA's libraries in the directories of
EVENKEEL_CUDA_LIBRARIES (separated by colons; a site-packages with NVIDIA's
wheels works), then in the wheels of the active virtual environment, then on the
loader's search path.")]
pub struct Args {
    /// Output format.
    #[arg(short, long, value_enum, value_name = "FORMAT", default_value_t = Format::Text)]
    output: Format,
}

/// The data of `-o json`.
#[derive(serde::Serialize)]
struct Report {
    #[serde(flatten)]
    inventory: Inventory,
    cuda_libraries: Vec<LibraryCheck>,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let report = Report {
        inventory: Inventory::discover(),
        cuda_libraries: libraries::find(),
    };
    match args.output {
        Format::Text => {
            let width = output::width();
            output::print(format!(
                "{}\n{}",
                text(&report.inventory, width),
                cuda(&report.cuda_libraries, width)
            ))?;
        }
        format => format.print(&report)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// `width`: columns of the terminal.
fn text(inventory: &Inventory, width: Option<usize>) -> String {
    let mut text = match &inventory.driver {
        DriverState::Absent { missing, install } => format!("{missing}; {install}\n"),
        DriverState::TooOld { message } | DriverState::Broken { message } => format!("{message}\n"),
        DriverState::Present { version, cuda } => format!(
            "NVIDIA driver {}, CUDA up to {}\n",
            version.as_deref().unwrap_or("of unknown version"),
            cuda.as_deref().unwrap_or("an unknown version")
        ),
    };
    if !inventory.gpus.is_empty() {
        text += &format!("\n{}\n", gpus(&inventory.gpus, width));
    }
    if let Some(message) = inventory
        .visibility
        .as_ref()
        .and_then(|v| v.message.as_ref())
    {
        text += &format!("warning: {message}\n");
    }
    text += &cpu(inventory);
    let devices = inventory.devices();
    let why = match (&devices, &inventory.driver) {
        // Reason why a working driver is unused. Other drivers' problems are printed above.
        (Devices::CpuRanks { why, .. }, DriverState::Present { .. }) => format!(" ({why})"),
        _ => String::new(),
    };
    text + &format!("without --gpus, plans use {devices}{why}\n")
}

fn gpus(gpus: &[Gpu], width: Option<usize>) -> String {
    let mut table = Table::new(["GPU", "NAME", "MEMORY USED", "MIG", "ECC", "UUID"]);
    let unknown = || human::UNKNOWN.to_owned();
    for gpu in gpus {
        let mut name = gpu.name.clone().unwrap_or_else(unknown);
        if gpu.problem.is_some() {
            name += " (unusable)";
        } else if !gpu.visible {
            name += " (hidden)";
        }
        table.row([
            gpu.index.to_string(),
            name,
            memory(gpu.memory),
            mig(gpu.mig.as_ref()),
            ecc(gpu.ecc),
            gpu.uuid.clone().unwrap_or_else(unknown),
        ]);
        for slice in gpu.mig.iter().flat_map(|mig| &mig.devices) {
            let hidden = if slice.visible { "" } else { " (hidden)" };
            let name = slice.name.clone().unwrap_or_else(unknown);
            table.row([
                format!("{}:{}", gpu.index, slice.index),
                format!("{name}{hidden}"),
                memory(slice.memory),
                String::new(),
                String::new(),
                slice.uuid.clone().unwrap_or_else(unknown),
            ]);
        }
    }
    table.render(width)
}

fn memory(memory: Option<GpuMemory>) -> String {
    memory.map_or_else(
        || human::UNKNOWN.to_owned(),
        |m| format!("{} of {}", bytes(m.used), bytes(m.total)),
    )
}

fn mig(mig: Option<&Mig>) -> String {
    let Some(mig) = mig else {
        return human::UNKNOWN.to_owned();
    };
    mode(mig.enabled, mig.pending)
}

fn ecc(ecc: Option<Ecc>) -> String {
    let Some(ecc) = ecc else {
        return human::UNKNOWN.to_owned();
    };
    let mode = mode(ecc.enabled, ecc.pending);
    match (ecc.uncorrected_volatile, ecc.uncorrected_aggregate) {
        (None | Some(0), None | Some(0)) => mode,
        (now, ever) => {
            let shown = |errors: Option<u64>| errors.map_or("?".to_owned(), |n| n.to_string());
            format!("{mode}, {} uncorrected ({} ever)", shown(now), shown(ever))
        }
    }
}

fn mode(now: bool, pending: bool) -> String {
    let word = |on| if on { "on" } else { "off" };
    if now == pending {
        word(now).to_owned()
    } else {
        format!("{}, {} after a reset", word(now), word(pending))
    }
}

fn cpu(inventory: &Inventory) -> String {
    let cpu = &inventory.cpu;
    let model = cpu.model.as_deref().unwrap_or("of unknown model");
    let cores = match cpu.cores_of_machine {
        Some(all) if all != cpu.cores => format!("{} of {all} logical cores", cpu.cores),
        _ => count(cpu.cores, "logical core"),
    };
    let memory = match (cpu.memory_available, cpu.memory_total) {
        (Some(available), Some(total)) => {
            format!(", {} of {} free", bytes(available), bytes(total))
        }
        _ => String::new(),
    };
    format!("CPU: {model}, {cores}{memory}\n")
}

fn cuda(found: &[LibraryCheck], width: Option<usize>) -> String {
    let mut table = Table::new(["CUDA LIBRARY", "FILE", "VERSION"]);
    for library in found {
        let mut version = match (&library.problem, &library.version) {
            (Some(problem), _) => problem.to_string(),
            (None, Some(version)) => version.clone(),
            (None, None) => "found".to_owned(),
        };
        // The loader's error message already contains the path.
        let path = library.path.as_ref().map(|path| path.display().to_string());
        if let Some(path) = path.filter(|path| !version.contains(path)) {
            version += &format!(" ({path})");
        }
        table.row([library.name.to_owned(), library.file.to_owned(), version]);
    }
    let looked = if found.iter().any(|library| library.problem.is_some()) {
        format!(
            "searched {}, the active virtual environment and the loader's search path\n",
            libraries::DIRECTORIES
        )
    } else {
        String::new()
    };
    table.render(width) + &looked + "`evenkeel launch` and a TrainingJob train on GPUs with them\n"
}

#[cfg(test)]
mod tests {
    use nvml_wrapper::error::NvmlError;

    use super::*;
    use crate::engine::cuda::libraries::{Fault, Problem};
    use crate::inventory::Readings;
    use crate::inventory::tests::{h100, partitioned, readings, without_nvml};

    /// The terminal output without colours.
    fn shown(inventory: &Inventory) -> String {
        anstream::adapter::strip_str(&text(inventory, None)).to_string()
    }

    #[test]
    fn gpus_are_a_table() {
        let sick = Gpu {
            ecc: Some(Ecc {
                enabled: true,
                pending: true,
                uncorrected_volatile: Some(3),
                uncorrected_aggregate: Some(14),
            }),
            mig: Some(Mig {
                enabled: false,
                pending: true,
                devices: Vec::new(),
            }),
            ..h100(2)
        };
        let old = Gpu {
            index: 3,
            name: Some("Tesla K20c".to_owned()),
            ..Gpu::default()
        };
        let lost = Gpu {
            index: 4,
            problem: Some("device fell off the bus or has otherwise become inacessible".to_owned()),
            ..Gpu::default()
        };
        let gpus = vec![h100(0), partitioned(1, 2), sick, old, lost];
        insta::assert_snapshot!(shown(&Inventory::from_readings(&readings(gpus))));
    }

    #[test]
    fn hidden_gpus_are_marked_and_a_bad_value_is_reported() {
        let readings = Readings {
            cuda_visible_devices: Some("1,9".to_owned()),
            ..readings(vec![h100(0), h100(1)])
        };
        insta::assert_snapshot!(shown(&Inventory::from_readings(&readings)));
    }

    #[test]
    fn a_machine_without_gpus_shows_its_cpu() {
        insta::assert_snapshot!(shown(&without_nvml(NvmlError::LibraryNotFound, Some(0))));
    }

    #[test]
    fn hiding_every_gpu_leaves_the_cpu() {
        let readings = Readings {
            cuda_visible_devices: Some(String::new()),
            ..readings(vec![h100(0)])
        };
        insta::assert_snapshot!(shown(&Inventory::from_readings(&readings)));
    }

    #[test]
    fn each_cuda_library_is_listed_with_its_version_or_install_command() {
        let found = |name, file| LibraryCheck {
            name,
            file,
            path: None,
            version: None,
            problem: None,
        };
        let libraries = [
            LibraryCheck {
                problem: Some(Problem {
                    fault: Fault::TooOld {
                        version: "11.8".to_owned(),
                        needed: "12.0".to_owned(),
                    },
                    install: "install NVIDIA's driver 525 or newer",
                }),
                ..found("driver", "libcuda.so.1")
            },
            found("NVML", "libnvidia-ml.so.1"),
            LibraryCheck {
                version: Some("12.9".to_owned()),
                path: Some("/wheels/nvidia/cuda_nvrtc/lib/libnvrtc.so.12".into()),
                ..found("NVRTC", "libnvrtc.so.12")
            },
            LibraryCheck {
                problem: Some(Problem {
                    fault: Fault::Missing,
                    install: "pip install nvidia-nccl-cu12",
                }),
                ..found("NCCL", "libnccl.so.2")
            },
        ];
        let shown = |libraries: &[LibraryCheck]| {
            anstream::adapter::strip_str(&cuda(libraries, None)).to_string()
        };
        insta::assert_snapshot!(shown(&libraries), @r"
    CUDA LIBRARY  FILE               VERSION
    driver        libcuda.so.1       11.8 is too old, 12.0 is needed: install NVIDIA's driver 525 or newer
    NVML          libnvidia-ml.so.1  found
    NVRTC         libnvrtc.so.12     12.9 (/wheels/nvidia/cuda_nvrtc/lib/libnvrtc.so.12)
    NCCL          libnccl.so.2       missing: pip install nvidia-nccl-cu12
    searched EVENKEEL_CUDA_LIBRARIES, the active virtual environment and the loader's search path
    `evenkeel launch` and a TrainingJob train on GPUs with them
    ");
        // The search path is not shown if all libraries work.
        insta::assert_snapshot!(shown(&libraries[1..3]), @r"
    CUDA LIBRARY  FILE               VERSION
    NVML          libnvidia-ml.so.1  found
    NVRTC         libnvrtc.so.12     12.9 (/wheels/nvidia/cuda_nvrtc/lib/libnvrtc.so.12)
    `evenkeel launch` and a TrainingJob train on GPUs with them
    ");
    }
}
