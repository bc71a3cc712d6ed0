//! What the launcher does for a program of the user's own, which reports nothing: it looks at its
//! checkpoints and repeats what it prints.

use std::path::PathBuf;

use super::{Launcher, RESTARTS};
use crate::agent::Foreign;
use crate::job::OwnCheckpoint;
use crate::launch::{LaunchError, RunDir, own};
use crate::recipe::Recipe;
use crate::recipe::spec::DrainSignal;
use crate::telemetry::{Display, Event};
use crate::train::Setup;

/// What has to be known of the user's own program.
pub(super) struct Own {
    recipe: Recipe,
    run: PathBuf,
    /// The newest of its checkpoints that was seen: a newer one is progress.
    pub(super) newest: Option<OwnCheckpoint>,
}

impl Own {
    pub(super) fn new(recipe: Recipe, setup: &Setup, run: &RunDir) -> Result<Own, LaunchError> {
        let run = own::absolute(run.path())?;
        let mut own = Own {
            recipe,
            run,
            newest: None,
        };
        own.newest = own.foreign(setup).newest();
        Ok(own)
    }

    pub(super) fn foreign<'a>(&'a self, setup: &'a Setup) -> Foreign<'a> {
        Foreign {
            recipe: &self.recipe,
            run: &self.run,
            base: Some(&setup.base),
        }
    }
}

impl Launcher<'_> {
    /// A program of the user's own makes progress by its checkpoints, which nobody reports.
    pub(super) fn own_progress(&mut self) {
        let Some(own) = &self.own else { return };
        let newest = own.foreign(&self.setup).newest();
        if newest != own.newest {
            self.restarts_left = RESTARTS;
        }
        if let Some(own) = &mut self.own {
            own.newest = newest;
        }
    }

    /// The current generation is over: what its ranks have printed last is shown.
    pub(super) fn leave(&mut self) {
        let current = self.current.take();
        for mut tail in current.into_iter().flat_map(|current| current.tails) {
            say(self.display, tail.rank(), tail.rest());
        }
    }

    /// Shows what the ranks of the current generation have printed.
    pub(super) fn pass_on(&mut self) {
        let current = self.current.as_mut();
        for tail in current.into_iter().flat_map(|current| &mut current.tails) {
            say(self.display, tail.rank(), tail.lines());
        }
    }

    /// How the user's own program is asked to leave, and the seconds that it then has.
    pub(super) fn drain_by(&self) -> (DrainSignal, u64) {
        let trainer = &self.setup.spec.trainer;
        (trainer.drain_signal, trainer.drain_seconds)
    }
}

/// Shows what a rank has printed.
fn say(display: &mut Display, rank: u64, lines: Vec<String>) {
    for line in lines {
        display.event(&Event::Said { rank, line });
    }
}
