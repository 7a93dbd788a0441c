//! How much may be registered at once, and who gives way to whom.
//!
//! Both replicas and their ranks are bounded, for the whole fleet and for each
//! principal: every rank is a row of the metrics and of the lists, and has its
//! points on a ring, so a fleet of few replicas can be as dear as one of many.

use super::{FleetConfig, State, entry::Entry, facts::ReplicaFacts};
use crate::{
    error::{Error, Reason},
    ids::ReplicaId,
};

/// So much there may be.
#[derive(Clone, Copy)]
struct Bounds {
    replicas: usize,
    ranks: usize,
}

/// What some replicas are together.
#[derive(Clone, Copy, Default)]
struct Sum {
    replicas: usize,
    ranks: usize,
}

/// Whose bounds are looked at.
#[derive(Clone, Copy)]
enum Part<'a> {
    Of(&'a str),
    Fleet,
}

impl Part<'_> {
    fn bounds(self, config: &FleetConfig) -> Bounds {
        match self {
            Self::Of(_) => Bounds {
                replicas: config.max_replicas_per_principal,
                ranks: config.max_ranks_per_principal,
            },
            Self::Fleet => Bounds {
                replicas: config.max_replicas,
                ranks: config.max_ranks,
            },
        }
    }

    fn holds(self, entry: &Entry) -> bool {
        match self {
            Self::Of(principal) => entry.owner.as_deref() == Some(principal),
            Self::Fleet => true,
        }
    }

    /// Whether a replica that is known as this has its place here already. What was
    /// nobody's does: an upgrade and a restart refuse nobody.
    fn had(self, known: &Entry) -> bool {
        known.owner.is_none() || self.holds(known)
    }
}

impl State {
    /// The dead that give way to what registers, so that there is room for it. A
    /// principal beyond its own bounds takes the places of its own. What is known and
    /// does not grow has its place, whatever the bounds are by now.
    ///
    /// # Errors
    /// FLEET_FULL.
    pub(super) fn room(
        &self,
        facts: &ReplicaFacts,
        principal: Option<&str>,
        config: &FleetConfig,
    ) -> Result<Vec<ReplicaId>, Error> {
        let mut gone = Vec::new();
        if let Some(principal) = principal {
            self.fit(facts, Part::Of(principal), config, &mut gone)?;
        }
        self.fit(facts, Part::Fleet, config, &mut gone)?;
        Ok(gone)
    }

    fn fit(
        &self,
        facts: &ReplicaFacts,
        part: Part<'_>,
        config: &FleetConfig,
        gone: &mut Vec<ReplicaId>,
    ) -> Result<(), Error> {
        let known = self.replicas.get(&facts.id);
        let had = known.filter(|known| part.had(known));
        let ranks = facts.ranks.len();
        if had.is_some_and(|had| ranks <= had.facts().ranks.len()) {
            return Ok(());
        }
        let bounds = part.bounds(config);
        let others = self.replicas.iter().filter(|(id, entry)| {
            **id != facts.id && part.holds(entry) && !gone.iter().any(|other| other == *id)
        });
        let mut sum = Sum::default();
        let mut dead = Vec::new();
        for (id, entry) in others {
            sum.replicas += 1;
            sum.ranks += entry.facts().ranks.len();
            if let Some(died_at) = entry.died_at {
                // Those go last whose next start an operator has drained beforehand.
                dead.push((entry.drains.holds(), died_at, id, entry.facts().ranks.len()));
            }
        }
        dead.sort_unstable();
        let mut dead = dead.into_iter();
        loop {
            let replicas_fit = had.is_some() || sum.replicas < bounds.replicas;
            let ranks_fit = sum.ranks.saturating_add(ranks) <= bounds.ranks;
            if replicas_fit && ranks_fit {
                return Ok(());
            }
            // Where the living alone are too many, no dead one is forgotten for nothing.
            let Some((_, _, id, its_ranks)) = dead.next() else {
                return Err(if replicas_fit {
                    too_many_ranks(part, bounds, sum, ranks)
                } else {
                    too_many_replicas(part, bounds)
                });
            };
            sum.replicas -= 1;
            sum.ranks -= its_ranks;
            gone.push(id.clone());
        }
    }
}

/// What its sender can do, once nothing else helps.
const END: &str = "end replicas that are not wanted; this one may register as soon as";

fn too_many_replicas(part: Part<'_>, bounds: Bounds) -> Error {
    let most = bounds.replicas;
    let text = match part {
        Part::Fleet => format!(
            "{most} replicas are registered and live, as many as are allowed: start the control \
             plane with a higher max-replicas, or {END} one has left or is dead"
        ),
        Part::Of(principal) => format!(
            "{most} replicas that {principal} registered live, as many as one principal may \
             have: start the control plane with a higher max-replicas-per-principal, give \
             other sidecars credentials of another principal, or {END} one of them has left or \
             is dead"
        ),
    };
    Error::new(Reason::FleetFull, text)
}

fn too_many_ranks(part: Part<'_>, bounds: Bounds, living: Sum, ranks: usize) -> Error {
    let (most, living) = (bounds.ranks, living.ranks);
    let text = match part {
        Part::Fleet => format!(
            "{living} ranks are registered and live, and {ranks} more are more than the {most} \
             that are allowed: start the control plane with a higher max-ranks, or {END} enough \
             have left or are dead"
        ),
        Part::Of(principal) => format!(
            "{living} ranks that {principal} registered live, and {ranks} more are more than \
             the {most} that one principal may have: start the control plane with a higher \
             max-ranks-per-principal, give other sidecars credentials of another principal, or \
             {END} enough of them have left or are dead"
        ),
    };
    Error::new(Reason::FleetFull, text)
}
