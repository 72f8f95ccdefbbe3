# Fits a line to R's built-in data set `cars` and writes the coefficients to coefficients.csv.
fit <- lm(dist ~ speed, data = cars)
write.csv(as.data.frame(coef(summary(fit))), "coefficients.csv")
cat(sprintf("stopping distance grows by %.2f ft per mph\n", coef(fit)[["speed"]]))
