//! One replica's lease: whether its heartbeats still vouch for it. Pure: time
//! comes in as an argument, always tokio's.
//!
//! | from                 | to      | when                                            |
//! |----------------------|---------|-------------------------------------------------|
//! | Unverified           | Alive   | its first beat, or it was asked and answers     |
//! | Alive                | Suspect | three beats are missing                         |
//! | Suspect              | Alive   | two good beats                                  |
//! | any but Dead         | Dead    | six beats are missing, and the data path got no |
//! |                      |         | answer for as long                              |
//! | any but Dead         | Held    | the same, while too many are silent at once,    |
//! |                      |         | and it has beaten before                        |
//! | Held                 | Suspect | a good beat, or an answer on the data path      |
//! | any                  | Dead    | its port refuses connections, it left, or a     |
//! |                      |         | newer start took its place: at once             |
//!
//! Unverified is what a restart of the control plane finds of a replica that it
//! knew: nobody has heard of it since. Held is self-preservation: when a good part
//! of a fleet falls silent at once, the fault is more likely here than there. Dead
//! is final: a replica that comes back is a new incarnation.
//!
//! Only a beat shows that there is a sidecar which could fall silent. Who registered
//! and never beat is nobody's evidence of a fault here, and is not spared either. A
//! restart remembers who had beaten; registering again is no beat.
//!
//! Suspect and Held take work where nobody else does, so that engines whose sidecars
//! all fell silent serve on, and prove by it that they live.

use std::time::Duration;

use tokio::time::Instant;

/// How patient leases are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseConfig {
    /// How often replicas are told to beat.
    pub interval: Duration,
    /// Beats missed until no new work is sent while others take it.
    pub suspect_after: u32,
    /// Beats missed until it is dead. Greater than `suspect_after`.
    pub dead_after: u32,
    /// Good beats that end a suspicion.
    pub beats_to_return: u32,
}

impl Default for LeaseConfig {
    fn default() -> Self {
        Self {
            interval: Duration::from_secs(2),
            suspect_after: 3,
            dead_after: 6,
            beats_to_return: 2,
        }
    }
}

impl LeaseConfig {
    /// Without a beat for this long, a replica is dead.
    pub fn ttl(&self) -> Duration {
        self.interval * self.dead_after
    }
}

/// Whether a replica's heartbeats vouch for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Liveness {
    /// Nobody has heard of it since the control plane was restarted: no new work.
    Unverified,
    /// They do.
    Alive,
    /// Some are missing: no new work while others take it.
    Suspect {
        /// Beats since; enough of them end the suspicion.
        good_beats: u32,
    },
    /// Its time is over, and it is not called dead because too many fell silent
    /// with it: no new work while others take it, and its keys move there.
    Held,
    /// Final.
    Dead,
}

/// One replica's lease.
#[derive(Clone, Copy, Debug)]
pub struct Lease {
    liveness: Liveness,
    /// The last beat, moved on by stalls of our own.
    last_beat: Instant,
    /// The last answer on the data path.
    last_success: Option<Instant>,
    /// It has beaten since it was registered.
    has_beaten: bool,
}

impl Lease {
    /// Of a replica that was known before a restart of the control plane, and
    /// whether it had beaten then.
    pub fn unverified(now: Instant, has_beaten: bool) -> Self {
        Self {
            liveness: Liveness::Unverified,
            has_beaten,
            ..Self::new(now)
        }
    }

    /// It was asked and answers. `grace`: its sidecar, which could not beat while
    /// nobody listened, may take so long on top to do so again. Returns whether
    /// the liveness changed.
    pub fn verified(&mut self, now: Instant, grace: Duration) -> bool {
        let unverified = self.liveness == Liveness::Unverified;
        if unverified {
            self.last_beat = now + grace;
            self.liveness = Liveness::Alive;
        }
        unverified
    }

    /// A new one, from a registration.
    pub fn new(now: Instant) -> Self {
        Self {
            liveness: Liveness::Alive,
            last_beat: now,
            last_success: None,
            has_beaten: false,
        }
    }

    /// Whether it has beaten since it was registered: its silence says something.
    pub fn has_beaten(&self) -> bool {
        self.has_beaten
    }

    /// What it says now.
    pub fn liveness(&self) -> Liveness {
        self.liveness
    }

    /// When the replica last beat.
    pub fn last_beat(&self) -> Instant {
        self.last_beat
    }

    /// A heartbeat arrived. Returns whether the liveness changed.
    pub fn beat(&mut self, now: Instant, config: &LeaseConfig) -> bool {
        self.has_beaten = true;
        self.heard(now, config)
    }

    /// It spoke, by a beat or by registering again: its time begins anew. Returns
    /// whether the liveness changed.
    pub fn heard(&mut self, now: Instant, config: &LeaseConfig) -> bool {
        let before = self.liveness;
        match self.liveness {
            Liveness::Alive => self.last_beat = now,
            Liveness::Unverified => {
                self.last_beat = now;
                self.liveness = Liveness::Alive;
            }
            Liveness::Suspect { good_beats } => {
                self.last_beat = now;
                let good_beats = good_beats + 1;
                self.liveness = if good_beats >= config.beats_to_return {
                    Liveness::Alive
                } else {
                    Liveness::Suspect { good_beats }
                };
            }
            Liveness::Held => {
                self.last_beat = now;
                self.liveness = if config.beats_to_return <= 1 {
                    Liveness::Alive
                } else {
                    Liveness::Suspect { good_beats: 1 }
                };
            }
            Liveness::Dead => {}
        }
        before != self.liveness
    }

    /// The data path got an answer at that time.
    pub fn succeeded(&mut self, at: Instant) {
        self.last_success = self.last_success.max(Some(at));
    }

    /// Enough beats are missing to suspect it, whatever the data path says.
    pub fn is_silent(&self, now: Instant, config: &LeaseConfig) -> bool {
        self.liveness != Liveness::Dead
            && now.saturating_duration_since(self.last_beat)
                >= config.interval * config.suspect_after
    }

    /// Time has passed. `spare`: nobody who has beaten is called dead for missing
    /// beats now. Returns whether the liveness changed.
    pub fn tick(&mut self, now: Instant, config: &LeaseConfig, spare: bool) -> bool {
        let before = self.liveness;
        let silent = now.saturating_duration_since(self.last_beat);
        match self.liveness {
            Liveness::Dead => {}
            _ if silent >= config.ttl() && !self.answers(now, config) => {
                self.liveness = if spare && self.has_beaten {
                    Liveness::Held
                } else {
                    Liveness::Dead
                };
            }
            Liveness::Alive if silent >= config.interval * config.suspect_after => {
                self.liveness = Liveness::Suspect { good_beats: 0 };
            }
            Liveness::Held if self.answers(now, config) => {
                self.liveness = Liveness::Suspect { good_beats: 0 };
            }
            // A suspect that falls silent again starts over.
            Liveness::Suspect { good_beats } if good_beats > 0 && silent >= config.interval * 2 => {
                self.liveness = Liveness::Suspect { good_beats: 0 };
            }
            Liveness::Unverified | Liveness::Alive | Liveness::Suspect { .. } | Liveness::Held => {}
        }
        before != self.liveness
    }

    /// Its port refuses, it left, or a newer start took its place.
    pub fn end(&mut self) {
        self.liveness = Liveness::Dead;
    }

    /// This process itself did not run for so long: beats may lie unread. One that
    /// was read after the stall and before this counts from when it was read.
    pub fn extend(&mut self, stall: Duration, now: Instant) {
        let moved = (self.last_beat + stall).min(now);
        self.last_beat = self.last_beat.max(moved);
    }

    fn answers(&self, now: Instant, config: &LeaseConfig) -> bool {
        self.last_success
            .is_some_and(|at| now.saturating_duration_since(at) < config.ttl())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const C: LeaseConfig = LeaseConfig {
        interval: Duration::from_secs(2),
        suspect_after: 3,
        dead_after: 6,
        beats_to_return: 2,
    };

    fn secs(s: f64) -> Duration {
        Duration::from_secs_f64(s)
    }

    #[tokio::test(start_paused = true)]
    async fn three_missed_beats_make_it_suspect_and_two_good_ones_bring_it_back() {
        let t = Instant::now();
        let mut lease = Lease::new(t);
        assert!(!lease.tick(t + secs(5.9), &C, false));
        assert!(lease.tick(t + secs(6.0), &C, false));
        assert_eq!(lease.liveness(), Liveness::Suspect { good_beats: 0 });
        assert!(lease.beat(t + secs(6.5), &C));
        assert_eq!(lease.liveness(), Liveness::Suspect { good_beats: 1 });
        assert!(lease.beat(t + secs(8.5), &C));
        assert_eq!(lease.liveness(), Liveness::Alive);
    }

    #[tokio::test(start_paused = true)]
    async fn six_missed_beats_kill_unless_the_data_path_answers() {
        let t = Instant::now();
        let mut lease = Lease::new(t);
        lease.tick(t + secs(6.0), &C, false);
        lease.succeeded(t + secs(11.0));
        assert!(!lease.tick(t + secs(12.0), &C, false), "it still answers");
        assert!(lease.tick(t + secs(23.0), &C, false));
        assert_eq!(lease.liveness(), Liveness::Dead);
    }

    #[tokio::test(start_paused = true)]
    async fn dead_is_final() {
        let t = Instant::now();
        let mut lease = Lease::new(t);
        lease.end();
        assert!(!lease.beat(t + secs(1.0), &C));
        assert!(!lease.beat(t + secs(2.0), &C));
        assert!(!lease.tick(t + secs(3.0), &C, false));
        assert_eq!(lease.liveness(), Liveness::Dead);
    }

    #[tokio::test(start_paused = true)]
    async fn a_stall_of_our_own_kills_nobody() {
        let t = Instant::now();
        let mut lease = Lease::new(t);
        lease.extend(secs(60.0), t + secs(61.0));
        assert!(!lease.tick(t + secs(61.0), &C, false));
        assert_eq!(lease.liveness(), Liveness::Alive);
    }

    #[tokio::test(start_paused = true)]
    async fn a_beat_that_is_read_before_the_stall_is_known_does_not_count_for_longer() {
        let t = Instant::now();
        let mut lease = Lease::new(t);
        lease.beat(t + secs(61.0), &C);
        lease.extend(secs(60.0), t + secs(61.0));
        assert!(lease.tick(t + secs(67.0), &C, false));
        assert!(lease.tick(t + secs(73.0), &C, false));
        assert_eq!(lease.liveness(), Liveness::Dead);
    }

    #[tokio::test(start_paused = true)]
    async fn of_an_unverified_one_a_beat_or_an_answer_is_enough_and_silence_is_its_end() {
        let t = Instant::now();
        let mut heard = Lease::unverified(t, true);
        assert!(
            !heard.tick(t + secs(11.0), &C, false),
            "no suspicion on top"
        );
        assert_eq!(heard.liveness(), Liveness::Unverified);
        assert!(heard.beat(t + secs(11.0), &C));
        assert_eq!(heard.liveness(), Liveness::Alive);

        let mut asked = Lease::unverified(t, true);
        assert!(asked.verified(t, C.ttl()));
        assert!(!asked.verified(t, C.ttl()), "told once");
        assert!(!asked.tick(t + secs(17.9), &C, false));
        assert!(asked.tick(t + secs(18.0), &C, false));
        assert_eq!(asked.liveness(), Liveness::Suspect { good_beats: 0 });

        let mut silent = Lease::unverified(t, true);
        assert!(silent.tick(t + secs(12.0), &C, false));
        assert_eq!(silent.liveness(), Liveness::Dead);
        let mut spared = Lease::unverified(t, true);
        assert!(spared.tick(t + secs(12.0), &C, true));
        assert_eq!(spared.liveness(), Liveness::Held);
        let mut never_beat = Lease::unverified(t, false);
        assert!(never_beat.tick(t + secs(12.0), &C, true));
        assert_eq!(never_beat.liveness(), Liveness::Dead);
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_never_beat_is_not_spared_however_often_it_registers() {
        let t = Instant::now();
        let mut lease = Lease::new(t);
        for s in [5.0, 10.0] {
            assert!(!lease.heard(t + secs(s), &C));
        }
        assert!(!lease.has_beaten());
        assert!(lease.tick(t + secs(16.0), &C, true));
        assert_eq!(lease.liveness(), Liveness::Suspect { good_beats: 0 });
        assert!(lease.tick(t + secs(22.0), &C, true));
        assert_eq!(lease.liveness(), Liveness::Dead);
    }

    #[tokio::test(start_paused = true)]
    async fn one_who_is_spared_is_held_and_comes_back_by_two_good_beats() {
        let t = Instant::now();
        let mut lease = Lease::new(t);
        lease.beat(t, &C);
        lease.tick(t + secs(6.0), &C, true);
        assert!(lease.tick(t + secs(12.0), &C, true));
        assert_eq!(lease.liveness(), Liveness::Held);
        assert!(!lease.tick(t + secs(600.0), &C, true));
        assert!(lease.beat(t + secs(601.0), &C));
        assert_eq!(lease.liveness(), Liveness::Suspect { good_beats: 1 });
        assert!(lease.beat(t + secs(603.0), &C));
        assert_eq!(lease.liveness(), Liveness::Alive);
    }

    #[tokio::test(start_paused = true)]
    async fn one_who_is_not_spared_any_more_is_dead() {
        let t = Instant::now();
        let mut lease = Lease::new(t);
        lease.beat(t, &C);
        assert!(lease.tick(t + secs(12.0), &C, true));
        assert_eq!(lease.liveness(), Liveness::Held);
        assert!(lease.tick(t + secs(12.5), &C, false));
        assert_eq!(lease.liveness(), Liveness::Dead);
    }
}
