//! Number of training processes of a launch, and the devices on which they compute.

use anyhow::bail;

use crate::engine::cuda::driver::CAPABILITY;
use crate::engine::cuda::libraries;
use crate::inventory::{Device, Devices, Inventory};
use crate::plan::{DeviceKind, DeviceMemory, MOST_GPUS};
use crate::util::format::count;

/// Where the user wants the built-in trainer to compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum DeviceChoice {
    /// On GPUs if each process can have one, else on the CPU.
    Auto,
    /// On the CPU.
    Cpu,
    /// On NVIDIA GPUs, or not at all.
    Cuda,
}

/// What the user said about processes.
#[derive(Debug, Clone, Copy)]
pub struct Asked {
    pub procs: Option<u64>,
    /// The world of the `plan` flags, in devices.
    pub world: Option<u64>,
    pub device: DeviceChoice,
}

/// The processes of a launch.
#[derive(Debug, PartialEq)]
pub struct Processes {
    pub count: u64,
    /// What they count as. An external trainer uses the GPUs that are here or that the user stated.
    pub device: DeviceKind,
    /// The GPUs that processes take in this order, at least one for each; empty for an external trainer and on
    /// the CPU.
    pub gpus: Vec<Device>,
    /// The number of these that can train together.
    pub together: usize,
    /// Explanation of a choice that the user did not make.
    pub note: Option<String>,
}

impl Processes {
    /// The devices on which they run, for people.
    pub fn devices(&self, external: bool, inventory: &Inventory) -> String {
        match external {
            true => self.device.count(self.count),
            false if self.gpus.is_empty() => inventory.cpu_ranks(self.count).to_string(),
            false => {
                let used = usize::try_from(self.count).unwrap_or(usize::MAX);
                let devices = self.gpus.iter().take(used).cloned().collect();
                Devices::Gpus { devices }.to_string()
            }
        }
    }

    /// The memory of the devices on which they run. An external trainer uses GPUs if there are any.
    pub fn memory(&self, external: bool, inventory: &Inventory) -> Option<DeviceMemory> {
        let gpus = match inventory.devices() {
            all @ Devices::Gpus { .. } if external => all,
            _ => Devices::Gpus {
                devices: self.gpus.clone(),
            },
        };
        if gpus.count() == 0 {
            return inventory.cpu.memory_available.map(DeviceMemory::Shared);
        }
        gpus.memory().map(DeviceMemory::Each)
    }
}

/// The GPUs of this machine.
#[derive(Debug)]
pub struct Gpus {
    /// Those that the driver lists and `CUDA_VISIBLE_DEVICES` shows.
    pub devices: Vec<Device>,
    /// Why others are not among them.
    pub unused: Option<String>,
    /// Why the built-in trainer cannot use one of them.
    pub problem: Option<String>,
    /// Why it cannot use several.
    pub problem_of_several: Option<String>,
}

impl Gpus {
    /// The GPUs for the built-in trainer. On the CPU it uses no library, and to open them takes time.
    pub fn of(inventory: &Inventory, device: DeviceChoice) -> Gpus {
        match inventory.devices() {
            Devices::Gpus { devices } => Gpus::of_devices(devices, || match device {
                DeviceChoice::Cpu => Default::default(),
                DeviceChoice::Auto | DeviceChoice::Cuda => libraries::problems(),
            }),
            Devices::CpuRanks { why, .. } => Gpus {
                devices: Vec::new(),
                unused: None,
                problem_of_several: Some(why.clone()),
                problem: Some(why),
            },
        }
    }

    /// These GPUs. `problems`: those of the libraries, with one GPU and with several.
    pub fn of_devices(
        devices: Vec<Device>,
        problems: impl FnOnce() -> [Option<String>; 2],
    ) -> Gpus {
        let unused = too_old(&devices);
        let (devices, old): (Vec<_>, Vec<_>) =
            devices.into_iter().partition(|gpu| old(gpu).is_none());
        let [problem, problem_of_several] = match devices.is_empty() {
            true => [unused.clone(), None],
            false => problems(),
        };
        Gpus {
            devices: if devices.is_empty() { old } else { devices },
            unused,
            problem,
            problem_of_several,
        }
    }
}

impl Asked {
    /// The processes of this machine.
    pub fn here(self, external: bool, inventory: &Inventory) -> anyhow::Result<Processes> {
        if external {
            return self.external(match inventory.devices() {
                Devices::Gpus { devices } => devices.len() as u64,
                Devices::CpuRanks { .. } => 0,
            });
        }
        self.built_in(Gpus::of(inventory, self.device))
    }

    /// The number of processes that the user stated.
    fn stated(self) -> anyhow::Result<Option<u64>> {
        match (self.procs, self.world) {
            (Some(procs), Some(world)) if procs != world => bail!(
                "--procs {procs} and a world of {} (--gpus) differ, but every process uses \
                 one device; set only one of them",
                count(world, "device")
            ),
            (None, Some(world)) if world > MOST_GPUS => bail!(
                "{world} devices exceed the limit of {MOST_GPUS} processes per machine; request fewer, or use `evenkeel plan`"
            ),
            (procs, world) => Ok(procs.or(world)),
        }
    }

    /// The processes of an external trainer: one for each GPU of this machine, unless stated.
    pub fn external(self, gpus: u64) -> anyhow::Result<Processes> {
        Ok(Processes {
            count: self.stated()?.unwrap_or(gpus.clamp(1, MOST_GPUS)),
            device: device_of(gpus > 0 || self.world.is_some()),
            gpus: Vec::new(),
            together: 0,
            note: None,
        })
    }

    /// The processes of the built-in trainer.
    pub fn built_in(self, mut gpus: Gpus) -> anyhow::Result<Processes> {
        let found = gpus.devices.len();
        let several = gpus
            .problem_of_several
            .or_else(|| different_models(&gpus.devices));
        let unused = gpus
            .unused
            .map(|why| format!("not every GPU is used: {why}"));
        let stated = self.stated()?;
        // Without a stated number, as many GPUs as can be used.
        let usable = match (self.device, &gpus.problem, &several) {
            (DeviceChoice::Cpu, ..) | (_, Some(_), _) => 0,
            (_, None, Some(_)) => found.min(1),
            (_, None, None) => found,
        };
        let processes = stated.unwrap_or((usable as u64).clamp(1, MOST_GPUS));
        let others_idle = several
            .as_ref()
            .filter(|_| stated.is_none() && usable < found)
            .map(|problem| {
                format!(
                    "{processes} of {} is used: {problem} (--procs 1 avoids this note)",
                    count(found as u64, "GPU")
                )
            });
        let obstacle = match (gpus.problem, &several) {
            (Some(problem), _) => Some(problem),
            (None, Some(problem)) if processes > 1 => Some(problem.clone()),
            _ if (found as u64) < processes => Some(format!(
                "{} for {}",
                count(found as u64, "GPU"),
                count(processes, "process")
            )),
            _ => None,
        };
        if self.device == DeviceChoice::Cpu {
            gpus.devices.clear();
        }
        let Some(obstacle) = obstacle.filter(|_| self.device != DeviceChoice::Cpu) else {
            return Ok(Processes {
                count: processes,
                device: device_of(!gpus.devices.is_empty()),
                together: several.map_or(gpus.devices.len(), |_| 1),
                gpus: gpus.devices,
                note: others_idle
                    .or(unused)
                    .filter(|_| self.device != DeviceChoice::Cpu),
            });
        };
        if self.device == DeviceChoice::Cuda {
            bail!("`--device cuda` is not possible: {obstacle}; or remove --device cuda");
        }
        // Who counts no GPUs, on a machine without any, expects the CPU.
        let surprises = found > 0 || self.world.is_some() && self.procs.is_none();
        Ok(Processes {
            count: processes,
            device: DeviceKind::Cpu,
            gpus: Vec::new(),
            together: 0,
            note: surprises.then(|| {
                format!(
                    "{} on the CPU, because GPUs cannot be used: {obstacle} (--device cpu avoids this note)",
                    count(processes, "process")
                )
            }),
        })
    }
}

/// What processes count as.
pub fn device_of(uses_gpus: bool) -> DeviceKind {
    if uses_gpus {
        DeviceKind::Cuda
    } else {
        DeviceKind::Cpu
    }
}

/// The compute capability of a GPU that the kernels do not support.
fn old(device: &Device) -> Option<(u32, u32)> {
    device.capability.filter(|of| *of < CAPABILITY)
}

/// The first GPU that the kernels do not support, and why.
fn too_old(devices: &[Device]) -> Option<String> {
    let mut found = devices
        .iter()
        .filter_map(|device| Some((device, old(device)?)));
    let (device, (major, minor)) = found.next()?;
    let name = device.name.as_deref().unwrap_or(&device.id);
    let needed = format!("{}.{}", CAPABILITY.0, CAPABILITY.1);
    Some(format!(
        "{name} has compute capability {major}.{minor}, {needed} is needed"
    ))
}

/// The problem of GPUs of different models, whose equal shares of a batch take different times.
fn different_models(devices: &[Device]) -> Option<String> {
    let name = |device: &Device| device.name.clone().unwrap_or_default();
    let mut names: Vec<String> = devices.iter().map(name).collect();
    names.dedup();
    (names.len() > 1).then(|| {
        format!(
            "the GPUs are of different models ({}); choose some of one model with CUDA_VISIBLE_DEVICES",
            names.join(", ")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(gpus: usize, problem: Option<&str>) -> Gpus {
        let device = |index: usize| Device {
            id: format!("GPU-{index}"),
            name: None,
            capability: None,
            memory: None,
        };
        Gpus {
            devices: (0..gpus).map(device).collect(),
            problem: problem.map(str::to_owned),
            unused: None,
            problem_of_several: problem.map(str::to_owned),
        }
    }

    fn asked(procs: Option<u64>, world: Option<u64>, device: DeviceChoice) -> Asked {
        Asked {
            procs,
            world,
            device,
        }
    }

    /// Processes, GPUs and note, or the refusal.
    fn built_in(asked: Asked, gpus: Gpus) -> String {
        match asked.built_in(gpus) {
            Ok(Processes {
                count, gpus, note, ..
            }) => {
                format!("{count} on {} {}", gpus.len(), note.unwrap_or_default())
            }
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn every_world_flag_gives_the_same_process_count() {
        let count = |procs, world| {
            let asked = asked(procs, world, DeviceChoice::Auto);
            built_in(asked, machine(0, Some("no GPU")))
        };
        assert_eq!(count(None, None), "1 on 0 ");
        assert_eq!(count(Some(3), None), "3 on 0 ");
        assert_eq!(count(Some(3), Some(3)), "3 on 0 ");
        insta::assert_snapshot!(count(Some(2), Some(8)), @"--procs 2 and a world of 8 devices (--gpus) differ, but every process uses one device; set only one of them");
        insta::assert_snapshot!(count(None, Some(100_000)), @"100000 devices exceed the limit of 1024 processes per machine; request fewer, or use `evenkeel plan`");
        insta::assert_snapshot!(count(None, Some(4)), @"4 on 0 4 processes on the CPU, because GPUs cannot be used: no GPU (--device cpu avoids this note)");
    }

    #[test]
    fn processes_take_gpus_if_there_are_enough() {
        use DeviceChoice::{Auto, Cpu, Cuda};
        for device in [Auto, Cuda] {
            let four = |procs| built_in(asked(procs, None, device), machine(4, None));
            assert_eq!([four(None), four(Some(2))], ["4 on 4 ", "2 on 4 "]);
        }
        let on = |procs, device| built_in(asked(Some(procs), None, device), machine(4, None));
        insta::assert_snapshot!(on(5, Auto), @"5 on 0 5 processes on the CPU, because GPUs cannot be used: 4 GPUs for 5 processes (--device cpu avoids this note)");
        insta::assert_snapshot!(on(5, Cuda), @"`--device cuda` is not possible: 4 GPUs for 5 processes; or remove --device cuda");
        assert_eq!(on(2, Cpu), "2 on 0 ");
        let broken = |device| {
            let gpus = machine(2, Some("NVRTC: missing"));
            built_in(asked(None, None, device), gpus)
        };
        insta::assert_snapshot!(broken(Auto), @"1 on 0 1 process on the CPU, because GPUs cannot be used: NVRTC: missing (--device cpu avoids this note)");
        insta::assert_snapshot!(broken(Cuda), @"`--device cuda` is not possible: NVRTC: missing; or remove --device cuda");
    }

    #[test]
    fn a_machine_that_cannot_use_several_gpus_uses_one() {
        let without_nccl = || Gpus {
            problem_of_several: Some("NCCL: missing".to_owned()),
            ..machine(2, None)
        };
        let on = |procs, device| built_in(asked(procs, None, device), without_nccl());
        insta::assert_snapshot!(on(None, DeviceChoice::Auto), @"1 on 2 1 of 2 GPUs is used: NCCL: missing (--procs 1 avoids this note)");
        insta::assert_snapshot!(on(Some(2), DeviceChoice::Auto), @"2 on 0 2 processes on the CPU, because GPUs cannot be used: NCCL: missing (--device cpu avoids this note)");
        insta::assert_snapshot!(on(Some(2), DeviceChoice::Cuda), @"`--device cuda` is not possible: NCCL: missing; or remove --device cuda");
        let mut mixed = machine(2, None);
        mixed.devices[0].name = Some("NVIDIA H100".to_owned());
        mixed.devices[1].name = Some("NVIDIA A100".to_owned());
        insta::assert_snapshot!(built_in(asked(Some(2), None, DeviceChoice::Cuda), mixed), @"`--device cuda` is not possible: the GPUs are of different models (NVIDIA H100, NVIDIA A100); choose some of one model with CUDA_VISIBLE_DEVICES; or remove --device cuda");
    }

    #[test]
    fn a_gpu_without_kernels_is_named() {
        let mut devices = machine(2, None).devices;
        assert_eq!(too_old(&devices), None);
        devices[0].capability = Some((8, 0));
        assert_eq!(too_old(&devices), None);
        devices[1].capability = Some((7, 5));
        insta::assert_snapshot!(too_old(&devices).unwrap(), @"GPU-1 has compute capability 7.5, 8.0 is needed");
    }

    #[test]
    fn an_external_trainer_takes_the_stated_processes_or_every_gpu() {
        let external = |world, gpus| {
            let asked = asked(None, world, DeviceChoice::Auto);
            asked.external(gpus).unwrap().count
        };
        assert_eq!(
            [external(Some(4), 0), external(None, 8), external(None, 0)],
            [4, 8, 1]
        );
    }
}
