//! The sidecar's states and every transition between them, apart from all I/O.

/// Where a sidecar stands.
///
/// ```text
///             EngineReady          Registered
///   Waiting ---------------> Registering ----------> Beating
///                              ^   ^  | RegisterFailed, RegisterRefused:
///                              |   |  | stays, and tries again
///                              |   +--+
///                              |
///   from Beating: Unknown, ReregisterAsked, FactsChanged (same boot id),
///                 EngineRestarted, Disowned (new boot id)
///
///   Beating --- Stale, the engine is the same start ---> Stopped (an error)
///   Beating --- Stale, the engine has restarted -------> Registering
///   Beating --- Shutdown --> Leaving --- Left --> Stopped
///   Waiting, Registering --- Shutdown --> Stopped
/// ```
///
/// A lost engine is no transition: beats go on and say that it is unhealthy,
/// because the control plane should hear so from its sidecar. Nor is a lost
/// control plane: beats are tried until it answers again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// For an engine that answers and tells its facts.
    Waiting,
    /// Facts are known; the control plane has not taken them yet.
    Registering,
    /// Registered.
    Beating,
    /// Finishing what runs, then deregistering.
    Leaving,
    /// Over.
    Stopped,
}

/// What can happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The engine told its facts.
    EngineReady,
    /// The control plane gave an incarnation.
    Registered,
    /// It did not answer.
    RegisterFailed,
    /// It finds the facts at fault.
    RegisterRefused,
    /// It does not know this replica.
    Unknown,
    /// It does not know it right after it was registered, time and again.
    Disowned,
    /// It asks for the facts anew.
    ReregisterAsked,
    /// The same start of the engine says something new about itself.
    FactsChanged,
    /// The engine is another start than the registered one.
    EngineRestarted,
    /// A newer start of this replica is registered, and it is not this one.
    Stale,
    /// The process shall end.
    Shutdown,
    /// Deregistered, or given up.
    Left,
}

/// What a transition asks of the boot id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Boot {
    /// As it is.
    Keep,
    /// The engine is another start, or the old start is over: a new one.
    Renew,
}

impl Phase {
    /// The transition, if there is one from here.
    pub fn on(self, event: Event) -> Option<(Self, Boot)> {
        use {Event as E, Phase as P};
        let next = match (self, event) {
            (P::Waiting, E::EngineReady) => (P::Registering, Boot::Keep),
            (P::Registering, E::Registered) => (P::Beating, Boot::Keep),
            (P::Registering, E::RegisterFailed | E::RegisterRefused) => (self, Boot::Keep),
            (P::Registering, E::EngineRestarted | E::Disowned) => (self, Boot::Renew),
            (P::Beating, E::Unknown | E::ReregisterAsked | E::FactsChanged) => {
                (P::Registering, Boot::Keep)
            }
            (P::Beating, E::EngineRestarted | E::Disowned) => (P::Registering, Boot::Renew),
            (P::Beating, E::Stale) => (P::Stopped, Boot::Keep),
            (P::Beating, E::Shutdown) => (P::Leaving, Boot::Keep),
            (P::Waiting | P::Registering, E::Shutdown) => (P::Stopped, Boot::Keep),
            (P::Leaving, E::Left) => (P::Stopped, Boot::Keep),
            _ => return None,
        };
        Some(next)
    }
}

#[cfg(test)]
mod tests {
    use super::{Boot, Event as E, Phase as P};

    #[test]
    fn only_another_start_gets_a_new_boot_id() {
        for phase in [
            P::Waiting,
            P::Registering,
            P::Beating,
            P::Leaving,
            P::Stopped,
        ] {
            for event in [
                E::EngineReady,
                E::Registered,
                E::RegisterFailed,
                E::RegisterRefused,
                E::Unknown,
                E::ReregisterAsked,
                E::FactsChanged,
                E::Stale,
                E::Shutdown,
                E::Left,
            ] {
                assert_ne!(
                    phase.on(event).map(|(_, boot)| boot),
                    Some(Boot::Renew),
                    "{phase:?} {event:?}"
                );
            }
        }
        assert_eq!(
            P::Beating.on(E::EngineRestarted),
            Some((P::Registering, Boot::Renew))
        );
    }

    #[test]
    fn a_shutdown_ends_every_phase_and_only_a_registered_one_takes_leave() {
        assert_eq!(P::Waiting.on(E::Shutdown), Some((P::Stopped, Boot::Keep)));
        assert_eq!(
            P::Registering.on(E::Shutdown),
            Some((P::Stopped, Boot::Keep))
        );
        assert_eq!(P::Beating.on(E::Shutdown), Some((P::Leaving, Boot::Keep)));
        assert_eq!(P::Leaving.on(E::Left), Some((P::Stopped, Boot::Keep)));
        assert_eq!(P::Stopped.on(E::Shutdown), None);
    }

    #[test]
    fn nothing_beats_before_it_is_registered() {
        assert_eq!(P::Waiting.on(E::Registered), None);
        assert_eq!(
            P::Registering.on(E::Registered),
            Some((P::Beating, Boot::Keep))
        );
    }
}
