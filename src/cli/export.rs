//! `evenkeel export`: writes what a run has trained for other programs.

use std::path::PathBuf;
use std::process::ExitCode;

use safetensors::tensor::Dtype;

use super::output::say;
use super::run_arg;
use crate::launch::export::{Export, Exported, export, name_of};
use crate::launch::generator::{Place, is_model};
use crate::telemetry::{Display, Event, Mode};
use crate::util::format::{bytes, count};

/// Write the newest checkpoint of a run as a folder that transformers or PEFT loads.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  evenkeel export zephyr --out zephyr-sft
  evenkeel export zephyr --out zephyr-sft --dtype bf16
  evenkeel export zephyr-qlora --out zephyr-merged --merge
  evenkeel export runs/zephyr/gen-1/step-0000120 --out step-120

A run that trained adapters gives the adapter, or with --merge the whole model
with the adapters added to its weights. Below a 4-bit model these are the
weights before they were rounded to 4 bits. The optimiser's state is left out.")]
pub struct Args {
    /// A run, or the directory of one of its checkpoints.
    run: PathBuf,
    /// The folder to write, which does not exist yet.
    #[arg(short, long, value_name = "DIRECTORY")]
    out: PathBuf,
    /// Add the adapters to the weights of the model below them.
    #[arg(long)]
    merge: bool,
    /// The type of the weights. Default: that of the model below the adapters, else f32, as they were trained
    #[arg(long, value_enum, value_name = "TYPE")]
    dtype: Option<WeightType>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum WeightType {
    F32,
    Bf16,
    F16,
}

impl From<WeightType> for Dtype {
    fn from(dtype: WeightType) -> Dtype {
        match dtype {
            WeightType::F32 => Dtype::F32,
            WeightType::Bf16 => Dtype::BF16,
            WeightType::F16 => Dtype::F16,
        }
    }
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let place = if is_model(&args.run) {
        Place::of_directory(args.run.clone())?
    } else {
        run_arg::newest_of(&run_arg::find(&args.run)?)?
    };
    let request = Export {
        out: &args.out,
        merges: args.merge,
        dtype: args.dtype.map(Dtype::from),
    };
    let mut display = Display::new(Mode::detect());
    let written = export(&place, request, &mut |done, total| {
        display.event(&Event::Preparing {
            what: "writing weights".into(),
            done,
            total,
        });
    });
    drop(display);
    let Exported {
        parameters,
        bytes: size,
        files,
        dtype,
        is_adapter,
    } = written?;
    let what = if is_adapter { "an adapter" } else { "a model" };
    say(format_args!(
        "exported: {} has {what} of {parameters} parameters, {} of {} ({}), from {}\n",
        args.out.display(),
        count(files as u64, "file"),
        bytes(size),
        name_of(dtype),
        place.directory.display()
    ));
    Ok(ExitCode::SUCCESS)
}
